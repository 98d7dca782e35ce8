"""Asynchronous all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from booster.comm.collectives import group_size
from booster.comm.operation import start_op
from booster.comm.started import PendingWork
from booster.kernels.shared_memory import can_reduce

__all__ = ["AllReduce", "start_all_reduce"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class AllReduce:
    """All-reduce in flight, started by `start_all_reduce`."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait until the tensor holds the sum.

        Raises:
            RankFailedError: A rank is lost or too late; the message names it.
        """
        if self._wait is not None:
            self._wait()
            self._wait = None


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> AllReduce:
    """Start the all-reduce of a tensor in place; 16-bit dtypes are summed in fp32 on the CPU.

    Args:
        tensor: Contiguous tensor on the backend's device. It must not be accessed until `wait` returns.
        group: Process group, optional; defaults to the world.

    Collective: every rank of the group must call it, with equally many elements of the same dtype.
    """
    size = group_size(group)
    if size == 1:
        return AllReduce()
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        raise AssertionError(f"a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not contiguous")
    volume = 2 * (size - 1) * tensor.nbytes // size
    operation = start_op("all_reduce", group, sent=volume, received=volume)
    group_memory = operation.memory_for(tensor) if can_reduce(tensor.dtype) else None
    if group_memory is not None:
        reduce = partial(group_memory.memory.all_reduce, tensor, "sum", operation.number)
        return AllReduce(PendingWork(group_memory, operation, reduce).wait)
    # gloo rounds a sum of 16-bit numbers after every addition
    is_widened = tensor.dtype in _LOW_PRECISION and tensor.device.type == "cpu"
    total = tensor.float() if is_widened else tensor
    with operation.translate_errors():
        work = dist.all_reduce(total, dist.ReduceOp.SUM, group=group, async_op=True)

    def wait() -> None:
        operation.wait(work)
        if is_widened:
            tensor.copy_(total)

    return AllReduce(wait)
