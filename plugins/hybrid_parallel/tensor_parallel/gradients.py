"""All-reduces of partial gradients of parameters that several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_reduce_sum
from booster.interface import ShardSpec

__all__ = ["all_reduce_replicated_grad", "all_reduce_shared_grad"]

# Note [Partial gradients]
# A replicated parameter gets the same gradient on all ranks if its input and the gradient of its output are equal on
# all. Otherwise (norms of a rank's own heads or tokens, key-value heads that several ranks read) each rank computes a
# partial gradient, which a tensor hook all-reduces as soon as autograd has computed it.


def all_reduce_replicated_grad(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """All-reduce the gradient of a parameter that is replicated on a group, in every backward.

    Collective: no; every backward is, over the group.
    """
    if parameter.requires_grad:
        parameter.register_hook(partial(_all_reduced, group))


def all_reduce_shared_grad(
    parameter: nn.Parameter, shard_specs: Sequence[ShardSpec], rank: int, group: dist.ProcessGroup | None
) -> None:
    """All-reduce the gradients of elements that several ranks of a group hold, in every backward.

    Args:
        parameter: This rank's shard.
        shard_specs: Shard specs of the parameter, one per rank.
        rank: This rank in the group.
        group: The process group; None is the world.

    Collective: no; every backward is, over the group, also on ranks without shared elements.
    """
    slices = _shared_slices(shard_specs, rank)
    if parameter.requires_grad and slices is not None:
        parameter.register_hook(partial(_all_reduced_slices, *slices, group))


def _all_reduced(group: dist.ProcessGroup | None, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.detach().to(_reduction_dtype(gradient), memory_format=torch.contiguous_format, copy=True)
    return all_reduce_sum(total, group).to(gradient.dtype)


SlicePairs = list[tuple[slice, slice]]


def _shared_slices(shard_specs: Sequence[ShardSpec], rank: int) -> tuple[int, int, SlicePairs] | None:
    """Find the elements of this rank's shard that other ranks hold as well.

    Returns:
        The sharded dimension, its total shared length, and pairs of slices of this rank's shard and of the all-reduced
        buffer; None if no elements are shared.
    """
    non_primary = [
        region.logical for shard_spec in shard_specs for region in shard_spec.regions if not region.is_primary
    ]
    if not non_primary:
        return None
    shape = shard_specs[0].logical_shape
    dim = next(dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in non_primary))
    starts: dict[tuple[int, int], int] = {}
    total = 0
    for offset, length in sorted({box[dim] for box in non_primary}):
        starts[offset, length], total = total, total + length
    slices: SlicePairs = []
    for region in shard_specs[rank].regions:
        (local, _), (logical, size) = region.local[dim], region.logical[dim]
        for (offset, length), start in starts.items():
            if logical <= offset and offset + length <= logical + size:
                position = local + offset - logical
                slices.append((slice(position, position + length), slice(start, start + length)))
    return dim, total, slices


def _all_reduced_slices(
    dim: int, length: int, slices: SlicePairs, group: dist.ProcessGroup | None, gradient: torch.Tensor
) -> torch.Tensor:
    shape = [*gradient.shape[:dim], length, *gradient.shape[dim + 1 :]]
    shared = torch.zeros(shape, dtype=_reduction_dtype(gradient), device=gradient.device)
    for local, position in slices:
        _narrow(shared, dim, position).copy_(_narrow(gradient, dim, local))
    all_reduce_sum(shared, group)
    result = gradient.clone()
    for local, position in slices:
        _narrow(result, dim, local).copy_(_narrow(shared, dim, position))
    return result


def _narrow(tensor: torch.Tensor, dim: int, span: slice) -> torch.Tensor:
    return tensor.narrow(dim, span.start, span.stop - span.start)


def _reduction_dtype(gradient: torch.Tensor) -> torch.dtype:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
