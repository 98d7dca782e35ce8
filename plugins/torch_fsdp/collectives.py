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
    from booster.plugins.torch_fsdp.units import ParamGroup

__all__ = ["ParamGroupAllGather", "ParamGroupReduceScatter", "allocate"]


def allocate(pool: BufferPool, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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


class ParamGroupAllGather(AllGather):
    """All-gather of a parameter group's weights.

    Args:
        unit: Parameter group.
    """

    def __init__(self, param_group: ParamGroup) -> None:
        self._param_group = param_group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the output buffer."""
        return allocate(self._param_group.pool, [int(one) for one in size], dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start the all-gather, in the collective order; it is in place, the input is a view of the output."""
        self._param_group.synchronize_gather()
        work = start_all_gather(output_tensor, group)
        if async_op:
            return _AllGatherWork(work)
        work.wait()
        return None


class ParamGroupReduceScatter(ReduceScatter):
    """Reduce-scatter into a parameter group's buffer of reduced gradients.

    FSDP2 calls `allocate` for the input (unsharded), then for the output (this rank's shard).

    Args:
        unit: Parameter group.
    """

    def __init__(self, param_group: ParamGroup) -> None:
        self._param_group = param_group
        self._has_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an input buffer, or the group's reduced gradients as output."""
        sizes = [int(one) for one in size]
        self._has_input = not self._has_input
        if self._has_input:
            return allocate(self._param_group.pool, sizes, dtype, device)
        return self._param_group.reduce_output(math.prod(sizes), dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter in the collective order. `op` is ignored: the reduction is always a sum."""
        self._param_group.reduce(input_tensor, output_tensor)


class _AllGatherWork(dist.Work):
    def __init__(self, work: Gathering) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True
