"""All-reduces of partial gradients of parameters that several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_reduce_sum
from booster.interface import ParameterLayout

__all__ = ["sum_shared_gradient", "sum_whole_gradient"]

# Note [Partial gradients]
# A replicated parameter gets the same gradient on all ranks if its input and the gradient of its output are equal on
# all. Otherwise (norms of a rank's own heads or tokens, key-value heads that several ranks read) each rank computes a
# partial gradient, which a tensor hook all-reduces as soon as autograd has computed it.


def sum_whole_gradient(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """All-reduce the gradient of a parameter that is replicated on a group, in every backward.

    Collective: no; every backward is, over the group.
    """
    if parameter.requires_grad:
        parameter.register_hook(partial(_summed, group))


def sum_shared_gradient(
    parameter: nn.Parameter, layouts: Sequence[ParameterLayout], rank: int, group: dist.ProcessGroup | None
) -> None:
    """All-reduce the gradients of elements that several ranks of a group hold, in every backward.

    Args:
        parameter: This rank's shard.
        layouts: Shard specs of the parameter, one per rank.
        rank: This rank in the group.
        group: The process group; None is the world.

    Collective: no; every backward is, over the group, also on ranks without shared elements.
    """
    spans = _shared_spans(layouts, rank)
    if parameter.requires_grad and spans is not None:
        parameter.register_hook(partial(_summed_spans, *spans, group))


def _summed(group: dist.ProcessGroup | None, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.detach().to(_sum_dtype(gradient), memory_format=torch.contiguous_format, copy=True)
    return all_reduce_sum(total, group).to(gradient.dtype)


Spans = list[tuple[slice, slice]]


def _shared_spans(layouts: Sequence[ParameterLayout], rank: int) -> tuple[int, int, Spans] | None:
    """Find the elements of this rank's shard that other ranks hold as well.

    Returns:
        The sharded dimension, its total shared length, and pairs of slices of this rank's shard and of the all-reduced
        buffer; None if no elements are shared.
    """
    foreign = [piece.logical for layout in layouts for piece in layout.pieces if not piece.is_primary]
    if not foreign:
        return None
    shape = layouts[0].logical_shape
    dim = next(dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in foreign))
    starts: dict[tuple[int, int], int] = {}
    total = 0
    for offset, length in sorted({box[dim] for box in foreign}):
        starts[offset, length], total = total, total + length
    spans: Spans = []
    for piece in layouts[rank].pieces:
        (local, _), (logical, size) = piece.local[dim], piece.logical[dim]
        for (offset, length), start in starts.items():
            if logical <= offset and offset + length <= logical + size:
                here = local + offset - logical
                spans.append((slice(here, here + length), slice(start, start + length)))
    return dim, total, spans


def _summed_spans(
    dim: int, length: int, spans: Spans, group: dist.ProcessGroup | None, gradient: torch.Tensor
) -> torch.Tensor:
    shape = [*gradient.shape[:dim], length, *gradient.shape[dim + 1 :]]
    shared = torch.zeros(shape, dtype=_sum_dtype(gradient), device=gradient.device)
    for own, place in spans:
        _part(shared, dim, place).copy_(_part(gradient, dim, own))
    all_reduce_sum(shared, group)
    result = gradient.clone()
    for own, place in spans:
        _part(result, dim, own).copy_(_part(shared, dim, place))
    return result


def _part(tensor: torch.Tensor, dim: int, span: slice) -> torch.Tensor:
    return tensor.narrow(dim, span.start, span.stop - span.start)


def _sum_dtype(gradient: torch.Tensor) -> torch.dtype:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
