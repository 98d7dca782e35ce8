"""Which tokens of a sequence each rank holds: numbers only, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["TokenOrder"]

# Note [Token order]
# Plain: P ranks hold P chunks in order. Zig-zag: the sequence is 2P chunks, and rank r holds chunk r and chunk
# 2P - 1 - r, one behind the other, so that with causal attention every rank has as many keys to look at: the first
# chunks see little, the last ones much. Lengths that don't divide make the first chunks one token longer; with fewer
# tokens than chunks the last ones are empty. Nothing is padded, so that no layer sees a token that isn't there.


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Where the tokens of one sequence lie; see Note [Token order].

    Attributes:
        length: Tokens of the whole sequence.
        num_ranks: Ranks that share it.
        is_zigzag: Whether a rank holds a chunk from the front and one from the back.
    """

    length: int
    num_ranks: int
    is_zigzag: bool = False

    def chunks(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Returns first token and one past the last of each chunk that the rank holds, in its own order."""
        if not self.is_zigzag:
            return (self._chunk(rank, self.num_ranks),)
        count = 2 * self.num_ranks
        return self._chunk(rank, count), self._chunk(count - 1 - rank, count)

    def local_length(self, rank: int) -> int:
        """Returns how many tokens the rank holds."""
        return sum(stop - start for start, stop in self.chunks(rank))

    def local_lengths(self) -> list[int]:
        """Returns how many tokens each rank holds."""
        return [self.local_length(rank) for rank in range(self.num_ranks)]

    def take(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Returns the rank's tokens of a tensor whose dimension `dim` is the whole sequence."""
        parts: list[torch.Tensor] = [whole.narrow(dim, start, stop - start) for start, stop in self.chunks(rank)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        """Returns the whole sequence in its original order from the parts of all ranks, by rank."""
        chunks = [
            (start, part.narrow(dim, offset, stop - start))
            for rank, part in enumerate(parts)
            for offset, start, stop in self._placed_chunks(rank)
        ]
        chunks.sort(key=lambda placed: placed[0])
        return torch.cat([chunk for _, chunk in chunks], dim)

    def _placed_chunks(self, rank: int) -> list[tuple[int, int, int]]:
        placed, offset = [], 0
        for start, stop in self.chunks(rank):
            placed.append((offset, start, stop))
            offset += stop - start
        return placed

    def _chunk(self, index: int, count: int) -> tuple[int, int]:
        base, rest = divmod(self.length, count)
        start = index * base + min(index, rest)
        return start, start + base + (index < rest)
