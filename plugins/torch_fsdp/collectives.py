"""FSDP2's custom all-gather and reduce-scatter on the collectives of `booster.comm`, in a common order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from booster.comm import AllGather as Gathering
from booster.comm import start_all_gather
from booster.plugins.sharding.buffer_pool import BufferPool

if TYPE_CHECKING:
    from booster.plugins.torch_fsdp.units import Unit

__all__ = ["UnitAllGather", "UnitReduceScatter", "room"]


def room(pool: BufferPool, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a collective; the pool reuses it when no tensor refers to it any more.

    On accelerators the caching allocator is used instead, which is stream-aware.
    """
    numel = math.prod(int(one) for one in size)
    if device.type != "cpu" or numel == 0:
        return torch.empty(numel, dtype=dtype, device=device)
    buffer = pool.take(numel * dtype.itemsize)
    memory = buffer.view(numel, dtype)
    pool.give_back(buffer)
    return memory


class UnitAllGather(AllGather):
    """All-gather of a parameter group's weights.

    Args:
        unit: Parameter group.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the output buffer."""
        return room(self._unit.pool, [int(one) for one in size], dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start the all-gather, in the collective order; it is in place, the input is a view of the output."""
        self._unit.arrive_to_gather()
        flight = start_all_gather(output_tensor, group)
        if async_op:
            return _GatheringWork(flight)
        flight.wait()
        return None


class UnitReduceScatter(ReduceScatter):
    """Reduce-scatter into a parameter group's buffer of reduced gradients.

    FSDP2 calls `allocate` for the input (unsharded), then for the output (this rank's shard).

    Args:
        unit: Parameter group.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._has_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an input buffer, or the group's reduced gradients as output."""
        sizes = [int(one) for one in size]
        self._has_input = not self._has_input
        if self._has_input:
            return room(self._unit.pool, sizes, dtype, device)
        return self._unit.output_of_reduction(math.prod(sizes), dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter in the collective order. `op` is ignored: the reduction is always a sum."""
        self._unit.reduce(input_tensor, output_tensor)


class _GatheringWork(dist.Work):
    def __init__(self, flight: Gathering) -> None:
        super().__init__()
        self._flight = flight

    def wait(self, timeout: Any = None) -> bool:
        self._flight.wait()
        return True
