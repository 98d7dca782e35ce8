"""Collectives over tokens in chunks, overlapped with the matmuls of other chunks (async tensor parallelism).

Note [Chunks]
The tokens of all ranks are chunked at the same offsets. A chunk is a tensor of equal shards (rank, sequences, tokens,
features); ranks with fewer tokens pad their last shard with zeros. The chunks together have as many bytes as the
unchunked collective of `regions`. Every chunk of a reduce-scatter is started as soon as it is computed, and all are
waited for at the end. All-gathers prefetch one chunk. Between ranks of one host transfers through shared memory happen
in the wait, so that nothing overlaps; the result is the same.
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
    """Whether matmuls of tokens are chunked; equal on all ranks.

    Args:
        x: Tokens of this rank or of all ranks, features last.
        ranks: The tensor-parallel group.
        dim: Dimension of the tokens.
        sizes: Number of tokens of each rank.
    """
    return ranks.sequence_mode == "ring" and ranks.size > 1 and dim == x.dim() - 2 and max(sizes) > 0


class Span(NamedTuple):
    """Range of a chunk in the tokens of each rank."""

    start: int
    length: int


class Chunks:
    """Chunks of the tokens in the second to last dimension; the dimensions before it are sequences.

    Args:
        ranks: The tensor-parallel group.
        sizes: Number of tokens of each rank, not all 0.
    """

    def __init__(self, ranks: TensorParallelRanks, sizes: Sequence[int]) -> None:
        self._ranks = ranks
        self._sizes = sizes
        longest = max(sizes)
        length = -(-longest // _NUM_CHUNKS)
        self._spans = [Span(start, min(length, longest - start)) for start in range(0, longest, length)]

    @property
    def num_own(self) -> int:
        """Number of tokens of this rank."""
        return self._sizes[self._ranks.rank]

    @property
    def num_whole(self) -> int:
        """Number of tokens of all ranks."""
        return sum(self._sizes)

    def gathered(self, own: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor]]:
        """All-gather chunk by chunk; while the caller computes, the next chunk is in flight.

        Args:
            own: Tokens of this rank.

        Yields:
            The range of a chunk, and its shards.

        Collective: yes.
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
        """Start a reduce-scatter of tokens that are computed chunk by chunk.

        Args:
            make: Function of a chunk's range that returns its shards in a new tensor. It overlaps with the
                reduce-scatters of the previous chunks.
            like: Tensor with the output's dtype, device and leading dimensions.
            num_features: Number of features of the output.

        Returns:
            The output tensor, and a function that waits until it is filled.

        Collective: yes.
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
        """Write the shards of a chunk to their positions in the tokens of all ranks.

        Args:
            pieces: Shards of the chunk (rank, sequences, tokens, features).
            span: Range of the chunk.
            whole: Contiguous tensor of the tokens of all ranks.
        """
        whole = _three_dimensional(whole)
        for rank, offset in enumerate(self._offsets()):
            start, length = self._place(span, rank)
            whole.narrow(1, offset + start, length).copy_(pieces[rank].narrow(1, 0, length))

    def take(self, whole: torch.Tensor, span: Span) -> torch.Tensor:
        """Return the shards of a chunk, padded with zeros."""
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
        return itertools.accumulate(self._sizes[:-1], initial=0)

    def _place(self, span: Span, rank: int) -> tuple[int, int]:
        start = min(span.start, self._sizes[rank])
        return start, min(span.length, self._sizes[rank] - start)


def _fill(piece: torch.Tensor, tokens: torch.Tensor) -> None:
    length = tokens.shape[1]
    piece.narrow(1, 0, length).copy_(tokens)
    piece.narrow(1, length, piece.shape[1] - length).zero_()


def _three_dimensional(x: torch.Tensor) -> torch.Tensor:
    """Return (sequences, tokens, features), a view if `x` is contiguous."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
