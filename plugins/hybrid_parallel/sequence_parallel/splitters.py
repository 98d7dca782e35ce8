"""Sharding of sequences over the sp axis or the tp axis."""

from __future__ import annotations

from typing import Protocol

import torch

from booster.comm import all_reduce_numbers
from booster.plugins.hybrid_parallel.sequence_parallel.arguments import token_dim
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelRanks
from booster.plugins.hybrid_parallel.sequence_parallel.regions import join_tokens, share_whole, split_tokens
from booster.plugins.hybrid_parallel.tensor_parallel.random_streams import SplitStream
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.regions import join_sequence, split_sequence

__all__ = ["SequenceAxisSplitter", "SequenceSplitter", "TensorAxisSplitter"]


class SequenceSplitter(Protocol):
    """Interface between a stack of layers and the sharding of its sequence."""

    @property
    def attention_ranks(self) -> SequenceParallelRanks | None:
        """The group of sequence-parallel attention, or None if attention sees all tokens."""

    @property
    def streams(self) -> SplitStream:
        """RNG state of this rank's tokens."""

    def split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens. Collective: in backward."""

    def join(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather the full sequence. Collective: yes."""

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Return the dimension along which a layer's argument is sharded, or None. Collective: no."""

    def share(self, x: torch.Tensor) -> torch.Tensor:
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

    def __init__(self, ranks: SequenceParallelRanks) -> None:
        self.ranks = ranks

    @property
    def attention_ranks(self) -> SequenceParallelRanks | None:
        """The group of sequence-parallel attention."""
        return self.ranks

    @property
    def streams(self) -> SplitStream:
        """RNG state of this rank's tokens."""
        return self.ranks.streams

    def split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens; see `regions.split_tokens`."""
        return split_tokens(x, self.ranks, dim)

    def join(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather the full sequence; see `regions.join_tokens`."""
        return join_tokens(x, self.ranks, dim, length)

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Return the dimension along which a layer's argument is sharded, or None."""
        return token_dim(name, tensor, length)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Return an unsharded tensor; see `regions.share_whole`."""
        return share_whole(x, self.ranks)

    def begin_layer(self, length: int | None) -> None:
        """No-op: attention gets the length from its context."""

    def end(self) -> None:
        """No-op."""

    def find_length(self, local_length: int) -> int:
        """Return the full sequence length. Collective: yes."""
        return int(all_reduce_numbers([local_length], self.ranks.group)[0])


class TensorAxisSplitter:
    """Sharding over the tensor-parallel ranks, whose regions gather the tokens again (arXiv:2205.05198).

    Args:
        ranks: The tensor-parallel group.
    """

    def __init__(self, ranks: TensorParallelRanks) -> None:
        self.ranks = ranks

    @property
    def attention_ranks(self) -> SequenceParallelRanks | None:
        """None, as regions gather the tokens and attention sees all."""
        return None

    @property
    def streams(self) -> SplitStream:
        """RNG state of this rank's tokens."""
        return self.ranks.streams

    def split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens; the gradient is replicated."""
        return split_sequence(x, self.ranks, dim)

    def join(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather the full sequence."""
        return join_sequence(x, self.ranks, dim, length)

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Return None, as other arguments are used inside of regions, where the sequence is unsharded."""
        return None

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor, as regions copy their inputs."""
        return x

    def begin_layer(self, length: int | None) -> None:
        """Set the sequence length that the regions gather."""
        self.ranks.sequence_length = length

    def end(self) -> None:
        """Reset the sequence length."""
        self.ranks.sequence_length = None

    def find_length(self, local_length: int) -> int:
        """Return the full sequence length. Collective: yes."""
        return int(all_reduce_numbers([local_length], self.ranks.group)[0])
