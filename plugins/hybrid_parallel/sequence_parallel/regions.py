"""Differentiable scatter and gather of tokens at the ends of a stack of layers.

All ranks compute the same loss from the full output, so the gradient of the stack's output is complete on every rank.
Parameter gradients are averaged over the data-parallel and sequence-parallel ranks together. Parameters outside of the
stack have equal gradients on all P sequence-parallel ranks, whose mean is correct. Parameters inside have the partial
gradients of each rank's tokens, whose mean would be too small by a factor of P. So all gradients inside of the stack
are scaled by P: multiplied where backward enters the stack, and divided where it leaves the stack.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from booster.comm import all_gather_equal, all_reduce_sum
from booster.plugins.hybrid_parallel.sequence_parallel.order import TokenOrder
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelRanks

__all__ = ["join_tokens", "share_whole", "split_tokens"]


def split_tokens(x: torch.Tensor, ranks: SequenceParallelRanks, dim: int) -> torch.Tensor:
    """Return this rank's tokens of a replicated tensor.

    Args:
        x: Tensor with the full sequence, equal on all ranks.
        ranks: The sequence-parallel group.
        dim: Dimension of the tokens.

    Collective: in backward, which gathers the gradient.
    """
    order = ranks.order_of(x.shape[dim])
    if ranks.size == 1:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return order.take(x, dim, ranks.rank)
    local: torch.Tensor = _SplitTokens.apply(x, ranks, order, dim)
    return local


def join_tokens(x: torch.Tensor, ranks: SequenceParallelRanks, dim: int, length: int) -> torch.Tensor:
    """Gather all ranks' tokens in their original order.

    Args:
        x: Tensor of this rank's tokens.
        ranks: The sequence-parallel group.
        dim: Dimension of the tokens.
        length: Tokens of the full sequence.

    Collective: yes, but not in backward, which takes this rank's tokens of the gradient.
    """
    if ranks.size == 1:
        return x
    whole: torch.Tensor = _JoinTokens.apply(x, ranks, ranks.order_of(length), dim)
    return whole


def share_whole(x: torch.Tensor, ranks: SequenceParallelRanks) -> torch.Tensor:
    """Return a tensor that stays replicated inside of the stack, such as encoder states in a decoder.

    Collective: in backward, which all-reduces the partial gradients.
    """
    if ranks.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    shared: torch.Tensor = _ShareWhole.apply(x, ranks)
    return shared


def _gather(x: torch.Tensor, ranks: SequenceParallelRanks, order: TokenOrder, dim: int) -> torch.Tensor:
    lengths = order.local_lengths()
    rows = x.detach().movedim(dim, 0)
    room = max(lengths) - rows.shape[0]
    if room > 0:
        rows = torch.cat([rows, rows.new_zeros(room, *rows.shape[1:])])
    gathered = all_gather_equal(rows.contiguous(), ranks.group).unflatten(0, (ranks.size, -1))
    parts = [part[:length].movedim(0, dim) for part, length in zip(gathered, lengths, strict=True)]
    return order.join(parts, dim)


class _SplitTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SequenceParallelRanks, order: TokenOrder, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.order, ctx.dim = ranks, order, dim
        return order.take(x, dim, ranks.rank).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad, ctx.ranks, ctx.order, ctx.dim).div_(ctx.ranks.size), None, None, None


class _JoinTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SequenceParallelRanks, order: TokenOrder, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.order, ctx.dim = ranks, order, dim
        return _gather(x, ranks, order, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.order.take(grad, ctx.dim, ctx.ranks.rank) * ctx.ranks.size, None, None, None


class _ShareWhole(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SequenceParallelRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = all_reduce_sum(grad.float() if grad.itemsize < 4 else grad.clone(), ctx.ranks.group)
        return total.div_(ctx.ranks.size).to(grad.dtype), None
