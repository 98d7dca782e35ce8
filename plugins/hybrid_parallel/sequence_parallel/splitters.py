"""What splits a sequence over ranks: those of an axis of its own, or those that share the layers' weights."""

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
    """What a stack of layers needs of whoever splits its sequence."""

    @property
    def attention_ranks(self) -> SequenceParallelRanks | None:
        """Those that attention communicates with, as it sees this rank's tokens only; None: it sees all."""

    @property
    def streams(self) -> SplitStream:
        """Random numbers of tokens that no other rank holds."""

    def split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's tokens."""

    def join(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Returns the whole sequence."""

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Returns the dimension along which a layer's argument is split; None: it stays whole. No communication."""

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what stays whole, for each rank to compute with."""

    def begin_layer(self, length: int | None) -> None:
        """Is told how long the whole sequence is, before each layer. No communication."""

    def end(self) -> None:
        """Is told that the stack has ended. No communication."""

    def find_length(self, local_length: int) -> int:
        """Returns how long the whole sequence is, from how much of it each rank holds."""


class SequenceAxisSplitter:
    """Splits over ranks that hold the same weights; attention inside of the stack exchanges what it needs.

    Args:
        ranks: Those that share the sequence.
    """

    def __init__(self, ranks: SequenceParallelRanks) -> None:
        self.ranks = ranks

    @property
    def attention_ranks(self) -> SequenceParallelRanks | None:
        """Those that attention communicates with."""
        return self.ranks

    @property
    def streams(self) -> SplitStream:
        """Random numbers of tokens that no other rank holds."""
        return self.ranks.streams

    def split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's tokens; see `regions.split_tokens`."""
        return split_tokens(x, self.ranks, dim)

    def join(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Returns the whole sequence; see `regions.join_tokens`."""
        return join_tokens(x, self.ranks, dim, length)

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Returns the dimension along which a layer's argument is split; None: it stays whole."""
        return token_dim(name, tensor, length)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what stays whole; see `regions.share_whole`."""
        return share_whole(x, self.ranks)

    def begin_layer(self, length: int | None) -> None:
        """Nothing to keep: attention is told the length by its context."""

    def end(self) -> None:
        """Nothing to forget."""

    def find_length(self, local_length: int) -> int:
        """Returns how long the whole sequence is. Collective."""
        return int(all_reduce_numbers([local_length], self.ranks.group)[0])


class TensorAxisSplitter:
    """Splits over the tensor-parallel ranks, whose regions gather the tokens again (arXiv:2205.05198).

    Args:
        ranks: Those that share the layers' weights.
    """

    def __init__(self, ranks: TensorParallelRanks) -> None:
        self.ranks = ranks

    @property
    def attention_ranks(self) -> SequenceParallelRanks | None:
        """None: regions gather the tokens, so that attention sees all."""
        return None

    @property
    def streams(self) -> SplitStream:
        """Random numbers of tokens that no other rank holds."""
        return self.ranks.streams

    def split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's tokens; its gradient is whole on all ranks."""
        return split_sequence(x, self.ranks, dim)

    def join(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Returns the whole sequence."""
        return join_sequence(x, self.ranks, dim, length)

    def token_dim(self, name: str, tensor: torch.Tensor, length: int) -> int | None:
        """Returns None: within the regions, where other arguments are used, the sequence is whole."""
        return None

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensor: regions take care of what enters them."""
        return x

    def begin_layer(self, length: int | None) -> None:
        """Tells the regions how long the sequence is that they gather."""
        self.ranks.sequence_length = length

    def end(self) -> None:
        """Forgets it."""
        self.ranks.sequence_length = None

    def find_length(self, local_length: int) -> int:
        """Returns how long the whole sequence is. Collective."""
        return int(all_reduce_numbers([local_length], self.ranks.group)[0])
