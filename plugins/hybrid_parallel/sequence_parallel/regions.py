"""Where tokens go to their ranks and come back: at the ends of a stack of layers.

Note [Gradients of shared sequences]: all ranks compute the same loss, each on the whole output, so a gradient that
enters the stack's end is complete on every rank. Gradients are averaged over the data-parallel and the
sequence-parallel ranks together. Parameters outside of the stack have equal gradients on all P sequence-parallel
ranks, whose mean is right. For those inside, each rank knows the share of its own tokens; their mean would be the sum
divided by P, so inside of the stack all gradients are P times as large: multiplied where backward enters it, divided
where it leaves it.
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
    """Returns this rank's tokens of a tensor that is whole and the same on all ranks.

    Args:
        x: Whole along `dim`.
        ranks: Those that share the sequence.
        dim: The dimension of tokens.

    No communication; backward gathers the gradient, see Note [Gradients of shared sequences], and is collective.
    """
    order = ranks.order_of(x.shape[dim])
    if ranks.size == 1:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return order.take(x, dim, ranks.rank)
    local: torch.Tensor = _SplitTokens.apply(x, ranks, order, dim)
    return local


def join_tokens(x: torch.Tensor, ranks: SequenceParallelRanks, dim: int, length: int) -> torch.Tensor:
    """Returns the whole tensor from every rank's tokens, in their original order.

    Args:
        x: This rank's tokens along `dim`.
        ranks: Those that share the sequence.
        dim: The dimension of tokens.
        length: Tokens of the whole sequence.

    Collective; backward takes this rank's tokens of the gradient and doesn't communicate.
    """
    if ranks.size == 1:
        return x
    whole: torch.Tensor = _JoinTokens.apply(x, ranks, ranks.order_of(length), dim)
    return whole


def share_whole(x: torch.Tensor, ranks: SequenceParallelRanks) -> torch.Tensor:
    """Returns a tensor that stays whole inside of the stack, as an encoder's states in a decoder do.

    Backward sums the gradient over the ranks, whose tokens each used all of it, and is collective.
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
