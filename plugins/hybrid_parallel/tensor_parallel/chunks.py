"""The tokens of all ranks in a few chunks, of which one travels while another is computed.

Note [Chunks]
The tokens of every rank are cut at the same places; a chunk is what all ranks have between two of them, in equal pieces
(rank, sequences, tokens, features). Ranks that have fewer tokens than others have a gap at the end of their last piece.
So the chunks together have as many bytes as the pieces that `regions` sends in one go. All chunks of a sum are started
as soon as they are computed, and waited for at the end; of a gathering there is always the next one under way. Where
ranks share a host, transfers through shared memory happen when they are waited for: the numbers are the same, and
nothing is gained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from booster.comm import AllGather, start_all_gather, start_reduce_scatter
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks

__all__ = ["Chunks", "Span", "runs_in_chunks"]

_NUM_CHUNKS = 4


def runs_in_chunks(x: torch.Tensor, ranks: TensorParallelRanks, dim: int, sizes: Sequence[int]) -> bool:
    """Returns whether products of tokens are computed in chunks; the same on all ranks.

    Args:
        x: Tokens, this rank's or all, with features last.
        ranks: Who have the tokens.
        dim: Along which the tokens lie.
        sizes: How many each rank has.
    """
    return ranks.sequence_mode == "ring" and ranks.size > 1 and dim == x.dim() - 2 and max(sizes) > 0


class Span(NamedTuple):
    """Where a chunk lies among the tokens of each rank."""

    start: int
    length: int


class Chunks:
    """How tokens are cut that lie along the last dimension but one; dimensions before it are sequences.

    Args:
        ranks: Who have the tokens.
        sizes: How many each of them has; not none altogether.
    """

    def __init__(self, ranks: TensorParallelRanks, sizes: Sequence[int]) -> None:
        self._ranks = ranks
        self._sizes = sizes
        longest = max(sizes)
        length = -(-longest // _NUM_CHUNKS)
        self._spans = [Span(start, min(length, longest - start)) for start in range(0, longest, length)]

    @property
    def num_own(self) -> int:
        """Tokens of this rank."""
        return self._sizes[self._ranks.rank]

    @property
    def num_whole(self) -> int:
        """Tokens of all ranks."""
        return sum(self._sizes)

    def gathered(self, own: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor]]:
        """Yields the pieces of all ranks, chunk by chunk; while the caller computes, the next one is under way.

        Args:
            own: This rank's tokens.

        Collective.
        """
        own = _three_dimensional(own)
        ahead: tuple[Span, torch.Tensor, AllGather] | None = None
        for following in itertools.chain((self._started(own, span) for span in self._spans), (None,)):
            if ahead is not None:
                span, pieces, gathering = ahead
                gathering.wait()
                yield span, pieces
            ahead = following

    def start_sum(
        self, make: Callable[[Span], torch.Tensor], like: torch.Tensor, num_features: int
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Starts the sum over the ranks of what is computed chunk by chunk, of which each rank gets its own tokens.

        Args:
            make: Returns the pieces of a chunk, which nobody else needs. While it runs, those before are under way.
            like: What the sum is like, but for the numbers of tokens and features.
            num_features: Of the sum.

        Returns:
            Room for the sum, and a function that waits until it is there.

        Collective.
        """
        total = like.new_empty((*like.shape[:-2], self.num_own, num_features))
        under_way = []
        for span in self._spans:
            pieces = make(span)
            under_way.append((span, pieces[self._ranks.rank], start_reduce_scatter(pieces.view(-1), self._ranks.group)))

        def finish() -> None:
            tokens = _three_dimensional(total)
            for span, piece, reduction in under_way:
                reduction.finish(piece.view(-1), accumulate=False)
                start, length = self._place(span, self._ranks.rank)
                tokens.narrow(1, start, length).copy_(piece.narrow(1, 0, length))
            under_way.clear()

        return total, finish

    def put(self, pieces: torch.Tensor, span: Span, whole: torch.Tensor) -> None:
        """Writes the pieces of a chunk to their places among the tokens of all ranks.

        Args:
            pieces: (rank, sequences, tokens, features).
            span: Which chunk.
            whole: Contiguous.
        """
        whole = _three_dimensional(whole)
        for rank, offset in enumerate(self._offsets()):
            start, length = self._place(span, rank)
            whole.narrow(1, offset + start, length).copy_(pieces[rank].narrow(1, 0, length))

    def take(self, whole: torch.Tensor, span: Span) -> torch.Tensor:
        """Returns the pieces of a chunk, zeros in the gaps."""
        whole = _three_dimensional(whole)
        pieces = whole.new_empty((len(self._sizes), whole.shape[0], span.length, whole.shape[2]))
        for rank, offset in enumerate(self._offsets()):
            start, length = self._place(span, rank)
            _fill(pieces[rank], whole.narrow(1, offset + start, length))
        return pieces

    def _started(self, own: torch.Tensor, span: Span) -> tuple[Span, torch.Tensor, AllGather]:
        pieces = own.new_empty((len(self._sizes), own.shape[0], span.length, own.shape[2]))
        _fill(pieces[self._ranks.rank], own.narrow(1, *self._place(span, self._ranks.rank)))
        return span, pieces, start_all_gather(pieces.view(-1), self._ranks.group)

    def _offsets(self) -> Iterator[int]:
        """Yields where each rank's tokens begin among those of all."""
        return itertools.accumulate(self._sizes[:-1], initial=0)

    def _place(self, span: Span, rank: int) -> tuple[int, int]:
        """Returns where a chunk begins among a rank's tokens, and how many of them it has."""
        start = min(span.start, self._sizes[rank])
        return start, min(span.length, self._sizes[rank] - start)


def _fill(piece: torch.Tensor, tokens: torch.Tensor) -> None:
    """Copies tokens to the beginning of a piece, and zeros to its end."""
    length = tokens.shape[1]
    piece.narrow(1, 0, length).copy_(tokens)
    piece.narrow(1, length, piece.shape[1] - length).zero_()


def _three_dimensional(x: torch.Tensor) -> torch.Tensor:
    """Returns (sequences, tokens, features); a view of what is contiguous."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
