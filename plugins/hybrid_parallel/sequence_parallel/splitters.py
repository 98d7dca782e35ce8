"""Sharding of sequences over the sp axis or the tp axis.

Differentiable scatter and gather of tokens at the ends of a stack of layers.

All ranks compute the same loss from the full output, so the gradient of the stack's output is complete on every rank.
Parameter gradients are averaged over the data-parallel and sequence-parallel ranks together. Parameters outside of the
stack have equal gradients on all P sequence-parallel ranks, whose mean is correct. Parameters inside have the partial
gradients of each rank's tokens, whose mean would be too small by a factor of P. So all gradients inside of the stack
are scaled by P: multiplied where backward enters the stack, and divided where it leaves the stack. Not so in short
sequences that every rank computes, see Note [Short sequences].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from booster.comm import all_gather_equal, all_reduce_numbers, all_reduce_sum
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.mappings import gather_from_tp_region, scatter_to_tp_region
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import even_sizes

from .group import SequenceParallelGroup, SequenceSharding


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
        ctx.sp_group, ctx.sharding, ctx.dim = sp_group, sharding, dim
        return sharding.shard(x, dim, sp_group.rank).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad, ctx.sp_group, ctx.sharding, ctx.dim).div_(ctx.sp_group.size), None, None, None


class _GatherTokens(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sp_group: SequenceParallelGroup, sharding: SequenceSharding, dim: int
    ) -> torch.Tensor:
        ctx.sp_group, ctx.sharding, ctx.dim = sp_group, sharding, dim
        return _gather(x, sp_group, sharding, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.sharding.shard(grad, ctx.dim, ctx.sp_group.rank) * ctx.sp_group.size, None, None, None


class _CopyReplicated(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sp_group: SequenceParallelGroup) -> torch.Tensor:
        ctx.sp_group = sp_group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = all_reduce_sum(grad.float() if grad.itemsize < 4 else grad.clone(), ctx.sp_group.group)
        return total.div_(ctx.sp_group.size).to(grad.dtype), None


class SequenceSplitter(ABC):
    """Sharding of the sequence of a stack of layers, with the defaults of one that needs nothing but `scatter`.

    Args:
        group: The ranks over which the sequence is sharded.

    Attributes:
        attention_group: The group of sequence-parallel attention, or None if attention sees all tokens.
        rng: RNG state of this rank's tokens.
    """

    attention_group: SequenceParallelGroup | None = None

    def __init__(self, group: SequenceParallelGroup | TensorParallelGroup) -> None:
        self.rng = group.rng
        self._process_group = group.group

    @abstractmethod
    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens of a replicated tensor. Collective: in backward, which gathers the gradient."""

    @abstractmethod
    def gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather all ranks' tokens in their original order.

        Args:
            x: Tensor of this rank's tokens.
            dim: Dimension of the tokens.
            length: Tokens of the full sequence.

        Collective: yes, but not in backward, which takes this rank's tokens of the gradient.
        """

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Return the dimension along which a layer's argument is sharded, or None. Collective: no."""
        return None

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor that stays unsharded for computation on shards, such as encoder states in a decoder.

        Collective: in backward, which all-reduces the partial gradients.
        """
        return x

    def set_sequences(self, length: int | None, num_sequences: int = 1) -> None:  # noqa: B027 (attention has its context)
        """Set the full length and the number of sequences before each layer, None at the end of the stack.

        Collective: no.
        """

    def find_length(self, local_length: int) -> int:
        """Return the full sequence length from each rank's number of tokens. Collective: yes."""
        return int(all_reduce_numbers([local_length], self._process_group)[0])


class SequenceAxisSplitter(SequenceSplitter):
    """Sharding over ranks with the same weights; attention in the stack communicates, and gets the length itself."""

    def __init__(self, sp_group: SequenceParallelGroup) -> None:
        super().__init__(sp_group)
        self.attention_group = self._sp_group = sp_group

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        sp_group, sharding = self._sp_group, self._sp_group.sharding_of(x.shape[dim])
        if sp_group.size == 1 or sharding.is_replicated:
            return x
        if not (x.requires_grad and torch.is_grad_enabled()):
            return sharding.shard(x, dim, sp_group.rank)
        local: torch.Tensor = _ScatterTokens.apply(x, sp_group, sharding, dim)
        return local

    def gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        sharding = self._sp_group.sharding_of(length)
        if self._sp_group.size == 1 or sharding.is_replicated:
            return x
        full: torch.Tensor = _GatherTokens.apply(x, self._sp_group, sharding, dim)
        return full

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        return token_dim(name, tensor, length)

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        if self._sp_group.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        copy: torch.Tensor = _CopyReplicated.apply(x, self._sp_group)
        return copy


class TensorAxisSplitter(SequenceSplitter):
    """Sharding over the tensor-parallel ranks, whose regions gather the tokens again (arXiv:2205.05198).

    Other arguments than the hidden states are used inside of regions, where the sequence is unsharded and inputs are
    copied.
    """

    def __init__(self, tp_group: TensorParallelGroup) -> None:
        super().__init__(tp_group)
        self._tp_group = tp_group

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return scatter_to_tp_region(x, self._tp_group, even_sizes(x.shape[dim], self._tp_group.size), dim)

    def gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        return gather_from_tp_region(x, self._tp_group, even_sizes(length, self._tp_group.size), dim)

    def set_sequences(self, length: int | None, num_sequences: int = 1) -> None:
        self._tp_group.sequence_length, self._tp_group.num_sequences = length, num_sequences


# Besides hidden states, layers take rotary tables (.., tokens, features), position ids (batch, tokens) and the like,
# which are sharded; attention masks, which attention needs in full; and other sequences to attend to, such as encoder
# states, which stay unsharded. Names decide if they are known, otherwise shapes: a number with one row per token is
# sharded, unless it also has one column per token.
_UNSHARDED_NAMES = ("mask", "bias", "encoder", "memory", "cross", "key_value", "cu_seq")
_POSITION_NAMES = ("position", "rotary", "rope", "cos", "sin", "freqs")


def token_dim(name: str, tensor: torch.Tensor, length: int) -> int | None:
    """Return the dimension of an argument along which it is sharded, or None.

    Args:
        name: Name of the layer's parameter.
        tensor: The argument.
        length: Tokens of the full sequence.
    """
    if tensor.dtype == torch.bool or any(word in name for word in _UNSHARDED_NAMES):
        return None
    sizes, count = tensor.shape, tensor.dim()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return count - 1 if 1 <= count <= 3 and sizes[-1] == length else None
    if count >= 2 and sizes[-2] == length and (sizes[-1] != length or any(word in name for word in _POSITION_NAMES)):
        return count - 2
    if count == 4 and sizes[1] == length and sizes[-1] != length:
        return 1
    if count == 3 and sizes[0] == length and sizes[1] == 1:
        return 0
    return None
