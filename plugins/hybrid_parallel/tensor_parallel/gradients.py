"""Gradients of parameters that several ranks hold, and of which each computes a part."""

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
# A parameter that ranks hold alike gets the same gradient on all of them where its input and the gradient of its output
# are the same on all. Where they are not (norms on a rank's own heads or tokens, key-value heads that several ranks
# read) each rank computes a part of the gradient, and the parts are summed as soon as autograd has this rank's.


def sum_whole_gradient(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """Has the gradient of a parameter that all ranks of a group hold whole summed over them in every backward.

    The backward is collective over the group.
    """
    if parameter.requires_grad:
        parameter.register_hook(partial(_summed, group))


def sum_shared_gradient(
    parameter: nn.Parameter, layouts: Sequence[ParameterLayout], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Has the gradient of elements that some ranks of a group hold alike summed over these in every backward.

    Args:
        parameter: This rank's part.
        layouts: What each rank holds of the parameter.
        rank: This one.
        group: All ranks.

    The backward is collective over the group, whether this rank shares an element or not.
    """
    spans = _shared_spans(layouts, rank)
    if parameter.requires_grad and spans is not None:
        parameter.register_hook(partial(_summed_spans, *spans, group))


def _summed(group: dist.ProcessGroup | None, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.detach().to(_sum_dtype(gradient), memory_format=torch.contiguous_format, copy=True)
    return all_reduce_sum(total, group).to(gradient.dtype)


Spans = list[tuple[slice, slice]]


def _shared_spans(layouts: Sequence[ParameterLayout], rank: int) -> tuple[int, int, Spans] | None:
    """Returns along which dimension this rank shares what, in its own part and among all that is shared.

    Returns:
        The dimension, how much of it is shared by any ranks, and pairs of slices; None if no rank shares anything.
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
