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
from booster.plugins.hybrid_parallel.sequence_parallel.order import SequenceSharding
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelGroup

__all__ = ["copy_replicated", "gather_tokens", "scatter_tokens"]


def scatter_tokens(x: torch.Tensor, sp_group: SequenceParallelGroup, dim: int) -> torch.Tensor:
    """Return this rank's tokens of a replicated tensor.

    Args:
        x: Tensor with the full sequence, equal on all ranks.
        sp_group: The sequence-parallel group.
        dim: Dimension of the tokens.

    Collective: in backward, which gathers the gradient.
    """
    sharding = sp_group.sharding_of(x.shape[dim])
    if sp_group.size == 1:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return sharding.shard(x, dim, sp_group.rank)
    local: torch.Tensor = _ScatterTokens.apply(x, sp_group, sharding, dim)
    return local


def gather_tokens(x: torch.Tensor, sp_group: SequenceParallelGroup, dim: int, length: int) -> torch.Tensor:
    """Gather all ranks' tokens in their original order.

    Args:
        x: Tensor of this rank's tokens.
        sp_group: The sequence-parallel group.
        dim: Dimension of the tokens.
        length: Tokens of the full sequence.

    Collective: yes, but not in backward, which takes this rank's tokens of the gradient.
    """
    if sp_group.size == 1:
        return x
    full: torch.Tensor = _GatherTokens.apply(x, sp_group, sp_group.sharding_of(length), dim)
    return full


def copy_replicated(x: torch.Tensor, sp_group: SequenceParallelGroup) -> torch.Tensor:
    """Return a tensor that stays replicated inside of the stack, such as encoder states in a decoder.

    Collective: in backward, which all-reduces the partial gradients.
    """
    if sp_group.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    copy: torch.Tensor = _CopyReplicated.apply(x, sp_group)
    return copy


def _gather(x: torch.Tensor, sp_group: SequenceParallelGroup, sharding: SequenceSharding, dim: int) -> torch.Tensor:
    lengths = sharding.local_lengths()
    rows = x.detach().movedim(dim, 0)
    padding = max(lengths) - rows.shape[0]
    if padding > 0:
        rows = torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])
    gathered = all_gather_equal(rows.contiguous(), sp_group.group).unflatten(0, (sp_group.size, -1))
    shards = [shard[:length].movedim(0, dim) for shard, length in zip(gathered, lengths, strict=True)]
    return sharding.unshard(shards, dim)


class _ScatterTokens(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sp_group: SequenceParallelGroup, sharding: SequenceSharding, dim: int
    ) -> torch.Tensor:
        ctx.ranks, ctx.order, ctx.dim = sp_group, sharding, dim
        return sharding.shard(x, dim, sp_group.rank).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad, ctx.ranks, ctx.order, ctx.dim).div_(ctx.ranks.size), None, None, None


class _GatherTokens(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sp_group: SequenceParallelGroup, sharding: SequenceSharding, dim: int
    ) -> torch.Tensor:
        ctx.ranks, ctx.order, ctx.dim = sp_group, sharding, dim
        return _gather(x, sp_group, sharding, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.order.take(grad, ctx.dim, ctx.ranks.rank) * ctx.ranks.size, None, None, None


class _CopyReplicated(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sp_group: SequenceParallelGroup) -> torch.Tensor:
        ctx.ranks = sp_group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = all_reduce_sum(grad.float() if grad.itemsize < 4 else grad.clone(), ctx.ranks.group)
        return total.div_(ctx.ranks.size).to(grad.dtype), None
