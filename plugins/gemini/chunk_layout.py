"""Layout of parameters, chunks and shards, equal on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Note [Chunk layout]
# A chunk is a flat buffer of full parameters of one kind: equal dtype, and all trained or all frozen. Parameters are
# consecutive; the rest at the end is waste. Over P ranks a chunk has P equal shards, and rank r owns shard r. One
# all-gather therefore provides the weights and one reduce-scatter reduces the gradients, with the same number of bytes
# on every link. A parameter may cover several shards, but never two chunks: a module's weights are views of the
# gathered chunk, without a copy.
#
# Shards start at multiples of 64 bytes, aligned for vector instructions. The other shards of a chunk (gradients, fp32
# master weights, moments) have equal numbers of elements but other dtypes. The narrowest, half precision, needs 32
# elements for 64 bytes, so all dtypes use multiples of 32 elements.
_ALIGNMENT_BYTES = 64
_HALF_FORMAT_BYTES = 2


def unit_numel(dtype: torch.dtype, num_shards: int) -> int:
    """Return the number of elements that every chunk size is a multiple of. See Note [Chunk layout].

    Args:
        dtype: Dtype of the chunk.
        num_shards: Number of ranks that share the chunk.
    """
    return num_shards * (_ALIGNMENT_BYTES // min(dtype.itemsize, _HALF_FORMAT_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """Layout information of a parameter.

    Attributes:
        name: Name in the model; the first one of a tied parameter.
        shape: Shape of the full parameter.
        dtype: Dtype in the chunk.
        trains: If False, the parameter is frozen.
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
    """Range of a parameter in its chunk.

    Attributes:
        index: Index of the parameter in the layout's sequence.
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
    """Elements of a parameter that a rank owns.

    Attributes:
        region_index: Index of the parameter's region among the chunk's regions.
        span: Range in the row-major flattening of the parameter: first element and one past the last.
        in_chunk: Range in the gathered chunk.
        in_shard: Range in the rank's shard.
    """

    region_index: int
    span: tuple[int, int]
    in_chunk: slice
    in_shard: slice


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Layout of one chunk. See Note [Chunk layout].

    Attributes:
        dtype: Dtype of all its parameters.
        trains: If False, the parameters are frozen, and the chunk has neither gradients nor states.
        numel: Number of elements, including the waste at the end.
        num_shards: Number of equal shards.
        regions: Regions of the parameters, in order.
    """

    dtype: torch.dtype
    trains: bool
    numel: int
    num_shards: int
    regions: tuple[ParamRegion, ...]

    def __post_init__(self) -> None:
        """Check the sizes, because a wrong one would only show as wrong values on some ranks."""
        unit = unit_numel(self.dtype, self.num_shards)
        assert self.numel % unit == 0, f"a chunk of {self.numel} elements is not a multiple of {unit}"
        assert self.used_numel <= self.numel, f"{self.used_numel} elements in a chunk of {self.numel}"

    @property
    def shard_numel(self) -> int:
        """Number of elements that each rank owns, including waste."""
        return self.numel // self.num_shards

    @property
    def used_numel(self) -> int:
        """Number of parameter elements."""
        return self.regions[-1].stop if self.regions else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the gathered chunk."""
        return self.numel * self.dtype.itemsize

    def shard_range(self, rank: int) -> slice:
        """Return the range of the chunk that a rank owns.

        Args:
            rank: Rank in the shard group.
        """
        assert 0 <= rank < self.num_shards, f"rank {rank} of {self.num_shards} shards"
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def parts(self, rank: int) -> list[ShardRegionInChunk]:
        """Return the regions that a rank owns, in order, without empty ones.

        Args:
            rank: Rank in the shard group.
        """
        owned = self.shard_range(rank)
        parts = []
        for index, region in enumerate(self.regions):
            start, stop = max(region.start, owned.start), min(region.stop, owned.stop)
            if start < stop:
                part = ShardRegionInChunk(
                    region_index=index,
                    span=(start - region.start, stop - region.start),
                    in_chunk=slice(start, stop),
                    in_shard=slice(start - owned.start, stop - owned.start),
                )
                parts.append(part)
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteReport:
    """Waste of a chunk plan.

    Attributes:
        num_chunks: Number of chunks.
        used: Number of parameter elements in all chunks.
        wasted: Number of elements that belong to no parameter.
    """

    num_chunks: int
    used: int
    wasted: int

    @property
    def ratio(self) -> float:
        """Fraction of the chunks' elements that is waste, from 0 to 1."""
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
        chunk_numel: Number of elements of a chunk; the last chunk of a kind and chunks of one parameter may differ.
        waste: Waste report of the chunks.
    """

    chunks: tuple[ChunkLayout, ...]
    chunk_numel: int
    waste: WasteReport
