"""What FSDP2 communicates through: the collectives of `booster.comm`, each when it is its turn."""

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
    """Returns memory for a collective that goes back to the pool by itself when nobody looks at it any more.

    Accelerators have an allocator that knows of streams; there the memory is its.
    """
    numel = math.prod(int(one) for one in size)
    if device.type != "cpu" or numel == 0:
        return torch.empty(numel, dtype=dtype, device=device)
    buffer = pool.take(numel * dtype.itemsize)
    memory = buffer.view(numel, dtype)
    pool.give_back(buffer)
    return memory


class UnitAllGather(AllGather):
    """Brings a unit's weights.

    Args:
        unit: The unit.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns room for what is gathered."""
        return room(self._unit.pool, [int(one) for one in size], dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Starts to gather when it is this unit's turn; the input lies in its place in the output already."""
        self._unit.arrive_to_gather()
        flight = start_all_gather(output_tensor, group)
        if async_op:
            return _GatheringWork(flight)
        flight.wait()
        return None


class UnitReduceScatter(ReduceScatter):
    """Sums a unit's gradients into its own memory for them.

    FSDP2 allocates the input, which is given by every rank, then the output, which is this rank's part of the sums.

    Args:
        unit: The unit.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._has_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns room for the input, or the unit's sums."""
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
        """Sums when it is this unit's turn. Sums are never averaged, whatever the operator says."""
        self._unit.reduce(input_tensor, output_tensor)


class _GatheringWork(dist.Work):
    """A gathering as torch waits for it."""

    def __init__(self, flight: Gathering) -> None:
        super().__init__()
        self._flight = flight

    def wait(self, timeout: Any = None) -> bool:
        self._flight.wait()
        return True
