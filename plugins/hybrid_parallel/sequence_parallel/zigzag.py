"""Sharding of a sequence's tokens over ranks. Pure functions, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Note [Zigzag order]
# Plain: P ranks hold P chunks in order. Zigzag: the sequence has 2P chunks, and rank r holds chunk r followed by chunk
# 2P - 1 - r. This balances causal attention, because early chunks attend to few keys and late chunks to many. If the
# length is not divisible, the first chunks have one more token; with fewer tokens than chunks the last chunks are
# empty. There is no padding.
#
# Note [Short sequences]
# With fewer tokens than ranks, as where a decoder starts to generate, some ranks would have none, which models can't
# compute: `view(batch, -1, heads, features)` is ambiguous without elements. So every rank computes all tokens.


@dataclass(frozen=True, slots=True)
class SequenceSharding:
    """Sharding of one sequence's tokens; see Note [Zigzag order].

    Attributes:
        length: Tokens of the full sequence.
        num_ranks: Number of ranks.
        is_zigzag: Whether the order is zigzag.
    """

    length: int
    num_ranks: int
    is_zigzag: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all tokens; see Note [Short sequences]."""
        return self.length < self.num_ranks

    def chunks(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return start and end (exclusive) of each of the rank's chunks, in its local order."""
        if self.is_replicated:
            return ((0, self.length),)
        if not self.is_zigzag:
            return (self._chunk(rank, self.num_ranks),)
        count = 2 * self.num_ranks
        return self._chunk(rank, count), self._chunk(count - 1 - rank, count)

    def local_length(self, rank: int) -> int:
        """Return the rank's number of tokens."""
        return sum(stop - start for start, stop in self.chunks(rank))

    def local_lengths(self) -> list[int]:
        """Return each rank's number of tokens."""
        return [self.local_length(rank) for rank in range(self.num_ranks)]

    def shard(self, full: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return the rank's tokens of a tensor whose dimension `dim` is the full sequence."""
        chunks: list[torch.Tensor] = [full.narrow(dim, start, stop - start) for start, stop in self.chunks(rank)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)

    def unshard(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the full sequence in its original order from all ranks' tokens, ordered by rank."""
        if self.is_replicated:
            return shards[0]
        chunks = [
            (full.start, shard.narrow(dim, local.start, local.stop - local.start))
            for rank, shard in enumerate(shards)
            for local, full in self.local_chunks(rank)
        ]
        chunks.sort(key=lambda placed: placed[0])
        return torch.cat([chunk for _, chunk in chunks], dim)

    def local_chunks(self, rank: int) -> list[tuple[slice, slice]]:
        """Return the ranges of each of the rank's chunks in its local tokens and in the full sequence."""
        ranges, offset = [], 0
        for start, stop in self.chunks(rank):
            ranges.append((slice(offset, offset + stop - start), slice(start, stop)))
            offset += stop - start
        return ranges

    def _chunk(self, index: int, count: int) -> tuple[int, int]:
        base, rest = divmod(self.length, count)
        start = index * base + min(index, rest)
        return start, start + base + (index < rest)
