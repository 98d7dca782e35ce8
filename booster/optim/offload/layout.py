"""Where the states of each parameter lie in a file, and in which stretches they are read and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["CHUNK_BYTES", "Chunk", "Piece", "PlaneLayout"]

# Note [Planes]
# exp_avg and exp_avg_sq of all parameters of a file form a *plane* each: one parameter after the other, so that a
# parameter's exp_avg is one stretch, whatever its size. Both planes have the same layout and are cut into *chunks* of
# `CHUNK_BYTES`; the part of a parameter in a chunk is a *piece*. A step moves a chunk of both planes at a time.
# Pieces begin at multiples of `_PIECE_ALIGNMENT`, so that every element has the same place in a vector register
# wherever its parameter is cut.
CHUNK_BYTES = 8 * 2**20
_PIECE_ALIGNMENT = 256
_PAGE_BYTES = 4096  # what direct reads and writes, and mappings, come in


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of a parameter's states.

    Attributes:
        index: The parameter's, in the file.
        start: First element of the parameter.
        stop: One past the last.
        offset: Where they begin, in bytes from the beginning of the chunk.
    """

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a plane: `num_bytes` from `start` on, whole pages."""

    start: int
    num_bytes: int
    pieces: tuple[Piece, ...]


class PlaneLayout:
    """The places of parameters in a plane, see Note [Planes].

    Args:
        sizes: For each parameter how many elements it has, at least one, and the bytes of one of them.

    Attributes:
        starts: For each parameter where it begins, in bytes.
        num_bytes: Size of a plane: whole pages.
        chunks: What the plane is cut into.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.starts: list[int] = []
        end = 0
        for numel, itemsize in sizes:
            self.starts.append(end)
            end = _round_up(end + numel * itemsize, _PIECE_ALIGNMENT)
        self.num_bytes = _round_up(end, _PAGE_BYTES)
        self.chunks = self._cut(sizes)

    def chunks_of(self, index: int, num_bytes: int) -> range:
        """Returns the numbers of the chunks in which a parameter's `num_bytes` lie."""
        start = self.starts[index]
        return range(start // CHUNK_BYTES, (start + num_bytes - 1) // CHUNK_BYTES + 1)

    def _cut(self, sizes: Sequence[tuple[int, int]]) -> list[Chunk]:
        pieces: list[list[Piece]] = [[] for _ in range(0, self.num_bytes, CHUNK_BYTES)]
        for index, (numel, itemsize) in enumerate(sizes):
            for chunk, piece in self._pieces_of(index, numel, itemsize):
                pieces[chunk].append(piece)
        starts = range(0, self.num_bytes, CHUNK_BYTES)
        return [
            Chunk(start, min(CHUNK_BYTES, self.num_bytes - start), tuple(own))
            for start, own in zip(starts, pieces, strict=True)
        ]

    def _pieces_of(self, index: int, numel: int, itemsize: int) -> Iterator[tuple[int, Piece]]:
        start = self.starts[index]
        for chunk in self.chunks_of(index, numel * itemsize):
            first = max(start, chunk * CHUNK_BYTES)
            last = min(start + numel * itemsize, (chunk + 1) * CHUNK_BYTES)
            yield (
                chunk,
                Piece(index, (first - start) // itemsize, (last - start) // itemsize, first - chunk * CHUNK_BYTES),
            )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
