"""Collectives under one name for every torch version and backend; a world that was never launched has one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from booster.comm.operation import begin
from booster.device import current_device

__all__ = [
    "all_gather_equal",
    "all_reduce_max",
    "all_reduce_numbers",
    "all_reduce_sum",
    "barrier",
    "broadcast",
    "collective_device",
    "global_rank_of",
    "group_rank",
    "group_size",
    "is_initialized",
]

# torch 2.13 renamed all_gather_into_tensor and warns at each call of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_initialized() -> bool:
    """Returns whether the default process group exists. No communication."""
    return dist.is_available() and dist.is_initialized()


def group_size(group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of ranks in the group (None: the world); 1 where nothing was launched. No communication."""
    return dist.get_world_size(group) if is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    """Returns this process's rank in the group (None: the world); 0 where nothing was launched. No communication."""
    return dist.get_rank(group) if is_initialized() else 0


def global_rank_of(rank_in_group: int, group: dist.ProcessGroup | None = None) -> int:
    """Returns the world rank of a rank of the group. No communication."""
    if group is None or not is_initialized():
        return rank_in_group
    return dist.get_global_rank(group, rank_in_group)


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Returns the device whose tensors the group's backend takes: the accelerator for nccl, else the CPU."""
    if not is_initialized():
        return torch.device("cpu")
    return torch.device("cpu") if "gloo" in str(dist.get_backend(group)) else current_device()


def all_reduce_numbers(numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Returns the sums of a few numbers over the group, in fp64, equal on every rank.

    Collective: every rank of the group must call it with as many numbers.
    """
    if group_size(group) == 1:
        return [float(number) for number in numbers]
    packed = torch.tensor(numbers, dtype=torch.float64, device=collective_device(group))
    _all_reduce(packed, dist.ReduceOp.SUM, group)
    return [float(number) for number in packed.tolist()]


def all_gather_equal(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns the ranks' tensors joined along dimension 0 in rank order; a scalar counts as one element.

    Collective: every rank of the group must call it with a tensor of the same shape and dtype.
    """
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    size = group_size(group)
    if size == 1:
        return tensor
    home, source = tensor.device, tensor.detach().to(collective_device(group)).contiguous()
    joined = source.new_empty((size * source.shape[0], *source.shape[1:]))
    volume = joined.nbytes - source.nbytes
    with begin("all_gather", group, sent=volume, received=volume).failures_named():
        _all_gather_single(joined, source, group=group)
    return joined.to(home)


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sums a tensor over the group in place and returns it; it lies where the group's backend takes it. Collective."""
    if group_size(group) > 1:
        _all_reduce(tensor, dist.ReduceOp.SUM, group)
    return tensor


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sets each element to the largest over the group in place and returns the tensor; else as `all_reduce_sum`."""
    if group_size(group) > 1:
        _all_reduce(tensor, dist.ReduceOp.MAX, group)
    return tensor


def _all_reduce(tensor: torch.Tensor, operator: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    size = group_size(group)
    volume = 2 * (size - 1) * tensor.nbytes // size
    with begin("all_reduce", group, sent=volume, received=volume).failures_named():
        dist.all_reduce(tensor, operator, group=group)


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Overwrites tensors with those of rank `source` of the group, in place.

    Collective: every rank of the group must call it with tensors of the same shapes and dtypes in the same order.
    """
    if group_size(group) == 1:
        return
    root = global_rank_of(source, group)
    device = collective_device(group)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        buffer = tensor.detach().to(device).contiguous()
        is_source = group_rank(group) == source
        sent, received = (buffer.nbytes, 0) if is_source else (0, buffer.nbytes)
        with begin("broadcast", group, sent=sent, received=received).failures_named():
            dist.broadcast(buffer, src=root, group=group)
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Waits until every rank of the group is here, at most for the group's timeout. Collective."""
    if group_size(group) > 1:
        all_reduce_numbers([0.0], group)
