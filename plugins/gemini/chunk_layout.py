"""Where parameters, chunks and pieces lie: numbers only, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Note [Chunk layout]
# A chunk is a flat buffer of whole parameters of one kind: of one dtype, and all of them trained or all frozen.
# They lie one after another without gaps; what remains at the end is waste. Over P ranks a chunk is P equal pieces,
# and rank r owns piece r. So one all-gather brings the weights and one reduce-scatter takes the gradients, with the
# same number of bytes on every link. A parameter may reach over several pieces, but never over two chunks: a module's
# weights are views of the gathered chunk, and nothing is ever put together from parts.
#
# Pieces begin at multiples of 64 bytes, so that vector instructions find them aligned. The other pieces of a chunk
# (gradients, fp32 master weights, moments) have as many elements but formats of their own. Half formats are the
# narrowest of these and need 32 elements for 64 bytes; so wider formats take 32 elements as well, not fewer.
_ALIGNMENT_BYTES = 64
_HALF_FORMAT_BYTES = 2


def unit_numel(dtype: torch.dtype, num_shards: int) -> int:
    """Return the number of elements that the size of every chunk is a multiple of. See Note [Chunk layout].

    Args:
        dtype: Dtype of the chunk.
        num_shards: Ranks that share the chunk.
    """
    return num_shards * (_ALIGNMENT_BYTES // min(dtype.itemsize, _HALF_FORMAT_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """What the layout has to know of a parameter.

    Attributes:
        name: In the model, of the first occurrence where the parameter is tied.
        shape: Shape of the full parameter.
        dtype: Its dtype.
        trains: False for a frozen one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParamRegion:
    """Where a parameter lies in its chunk.

    Attributes:
        index: Index of the parameter in the sequence that was laid out.
        shape: Shape of the parameter.
        start: First element in the chunk.
        stop: One past the last.
    """

    index: int
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ShardRegionInChunk:
    """What a rank owns of a parameter.

    Attributes:
        region_index: Index of the parameter's region among the chunk's regions.
        span: Within the row-major flattening of the parameter: first element and one past the last.
        in_chunk: Within the gathered chunk.
        in_shard: Within the rank's piece.
    """

    region_index: int
    span: tuple[int, int]
    in_chunk: slice
    in_shard: slice


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """One chunk. See Note [Chunk layout].

    Attributes:
        dtype: Dtype of all its parameters.
        trains: Whether they train; a chunk of frozen parameters has neither gradients nor states.
        numel: Elements, the waste at the end included.
        num_shards: Into how many pieces it is cut.
        regions: Regions of the parameters, in order.
    """

    dtype: torch.dtype
    trains: bool
    numel: int
    num_shards: int
    regions: tuple[ParamRegion, ...]

    def __post_init__(self) -> None:
        """A wrong size would show only as wrong numbers on some ranks."""
        unit = unit_numel(self.dtype, self.num_shards)
        assert self.numel % unit == 0, f"a chunk of {self.numel} elements is not a multiple of {unit}"
        assert self.used_numel <= self.numel, f"{self.used_numel} elements in a chunk of {self.numel}"

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns, waste included."""
        return self.numel // self.num_shards

    @property
    def used_numel(self) -> int:
        """Elements of parameters."""
        return self.regions[-1].stop if self.regions else 0

    @property
    def waste_numel(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - self.used_numel

    @property
    def num_bytes(self) -> int:
        """Bytes of the gathered chunk."""
        return self.numel * self.dtype.itemsize

    def shard_range(self, rank: int) -> slice:
        """Return the part of the chunk that a rank owns.

        Args:
            rank: Within the shard group.
        """
        assert 0 <= rank < self.num_shards, f"rank {rank} of {self.num_shards} shards"
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def parts(self, rank: int) -> list[ShardRegionInChunk]:
        """Return what a rank owns of each parameter, in order; of those it owns nothing of there is no part.

        Args:
            rank: Within the shard group.
        """
        piece = self.shard_range(rank)
        return [part for index in range(len(self.regions)) if (part := self._part(index, piece)) is not None]

    def _part(self, place_index: int, piece: slice) -> ShardRegionInChunk | None:
        place = self.regions[place_index]
        start, stop = max(place.start, piece.start), min(place.stop, piece.stop)
        if start >= stop:
            return None
        return ShardRegionInChunk(
            region_index=place_index,
            span=(start - place.start, stop - place.start),
            in_chunk=slice(start, stop),
            in_shard=slice(start - piece.start, stop - piece.start),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteReport:
    """How well the chunks are filled.

    Attributes:
        num_chunks: Number of chunks.
        used: Elements of parameters in all of them.
        wasted: Elements that belong to no parameter.
    """

    num_chunks: int
    used: int
    wasted: int

    @property
    def ratio(self) -> float:
        """Share of the chunks' elements that is waste, from 0 to 1."""
        return self.wasted / max(1, self.used + self.wasted)

    def describe(self) -> str:
        """Return one line for a log."""
        chunks = "1 chunk" if self.num_chunks == 1 else f"{self.num_chunks} chunks"
        return f"{chunks} for {self.used:,} elements of parameters, and {self.wasted:,} unused ({self.ratio:.2%})"


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All chunks of a model.

    Attributes:
        chunks: Chunks, in the order of the first parameter in each.
        chunk_numel: Elements of a chunk, but for those that are cut at the end of a kind or made for one parameter.
        waste: Share of unused elements.
    """

    chunks: tuple[ChunkLayout, ...]
    chunk_numel: int
    waste: WasteReport
