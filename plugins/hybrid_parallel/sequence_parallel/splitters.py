"""Sharding of sequences over the sp axis or the tp axis."""

from __future__ import annotations

from typing import Protocol

import torch

from booster.comm import all_reduce_numbers
from booster.plugins.hybrid_parallel.sequence_parallel.arguments import token_dim
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelGroup
from booster.plugins.hybrid_parallel.sequence_parallel.regions import copy_replicated, gather_tokens, scatter_tokens
from booster.plugins.hybrid_parallel.tensor_parallel.random_streams import TensorParallelRNG
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.regions import (
    gather_from_sequence_region,
    scatter_to_sequence_region,
)

__all__ = ["SequenceAxisSplitter", "SequenceSplitter", "TensorAxisSplitter"]


class SequenceSplitter(Protocol):
    """Interface between a stack of layers and the sharding of its sequence."""

    @property
    def attention_group(self) -> SequenceParallelGroup | None:
        """The group of sequence-parallel attention, or None if attention sees all tokens."""

    @property
    def rng(self) -> TensorParallelRNG:
        """RNG state of this rank's tokens."""

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens. Collective: in backward."""

    def gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather the full sequence. Collective: yes."""

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Return the dimension along which a layer's argument is sharded, or None. Collective: no."""

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """Return an unsharded tensor for computation on shards. Collective: in backward."""

    def begin_layer(self, length: int | None) -> None:
        """Set the full sequence length before each layer. Collective: no."""

    def end(self) -> None:
        """Reset at the end of the stack. Collective: no."""

    def find_length(self, local_length: int) -> int:
        """Return the full sequence length from each rank's number of tokens. Collective: yes."""


class SequenceAxisSplitter:
    """Sharding over ranks with the same weights; attention in the stack communicates.

    Args:
        ranks: The sequence-parallel group.
    """

    def __init__(self, sp_group: SequenceParallelGroup) -> None:
        self.sp_group = sp_group

    @property
    def attention_group(self) -> SequenceParallelGroup | None:
        """The group of sequence-parallel attention."""
        return self.sp_group

    @property
    def rng(self) -> TensorParallelRNG:
        """RNG state of this rank's tokens."""
        return self.sp_group.rng

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens; see `regions.scatter_tokens`."""
        return scatter_tokens(x, self.sp_group, dim)

    def gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather the full sequence; see `regions.gather_tokens`."""
        return gather_tokens(x, self.sp_group, dim, length)

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Return the dimension along which a layer's argument is sharded, or None."""
        return token_dim(name, tensor, length)

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """Return an unsharded tensor; see `regions.copy_replicated`."""
        return copy_replicated(x, self.sp_group)

    def begin_layer(self, length: int | None) -> None:
        """No-op: attention gets the length from its context."""

    def end(self) -> None:
        """No-op."""

    def find_length(self, local_length: int) -> int:
        """Return the full sequence length. Collective: yes."""
        return int(all_reduce_numbers([local_length], self.sp_group.group)[0])


class TensorAxisSplitter:
    """Sharding over the tensor-parallel ranks, whose regions gather the tokens again (arXiv:2205.05198).

    Args:
        ranks: The tensor-parallel group.
    """

    def __init__(self, tp_group: TensorParallelGroup) -> None:
        self.tp_group = tp_group

    @property
    def attention_group(self) -> SequenceParallelGroup | None:
        """None, as regions gather the tokens and attention sees all."""
        return None

    @property
    def rng(self) -> TensorParallelRNG:
        """RNG state of this rank's tokens."""
        return self.tp_group.rng

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens; the gradient is replicated."""
        return scatter_to_sequence_region(x, self.tp_group, dim)

    def gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather the full sequence."""
        return gather_from_sequence_region(x, self.tp_group, dim, length)

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Return None, as other arguments are used inside of regions, where the sequence is unsharded."""
        return None

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor, as regions copy their inputs."""
        return x

    def begin_layer(self, length: int | None) -> None:
        """Set the sequence length that the regions gather."""
        self.tp_group.sequence_length = length

    def end(self) -> None:
        """Reset the sequence length."""
        self.tp_group.sequence_length = None

    def find_length(self, local_length: int) -> int:
        """Return the full sequence length. Collective: yes."""
        return int(all_reduce_numbers([local_length], self.tp_group.group)[0])
