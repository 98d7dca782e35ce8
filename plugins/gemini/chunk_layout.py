"""Layout of parameters, chunks and shards, equal on all ranks, and the search of the chunk size; pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

# Note [Chunk layout]
# A chunk is a flat buffer of full parameters of one kind: equal dtype, and all trained or all frozen. Parameters follow
# each other; elements that align the next one's start, and the rest at the end, are waste. Over P ranks a chunk has P
# equal shards, and rank r owns shard r. One all-gather therefore provides the weights and one reduce-scatter reduces
# the gradients, with the same number of bytes on every link. A parameter may cover several shards, but never two
# chunks: a module's weights are views of the gathered chunk, without a copy.
#
# Shards start at multiples of 64 bytes, aligned for vector instructions. The other shards of a chunk (gradients, fp32
# master weights, moments) have equal numbers of elements but other dtypes. The narrowest, half precision, needs 32
# elements for 64 bytes, so all dtypes use multiples of 32 elements. Parameters start at multiples of 16 bytes in half
# precision: CUDA's grouped products reject other addresses.
_ALIGNMENT_BYTES = 64
_HALF_FORMAT_BYTES = 2
_PARAM_ALIGNMENT = 8


def unit_numel(dtype: torch.dtype, num_shards: int) -> int:
    """Return the number of elements that every chunk size is a multiple of. See Note [Chunk layout]."""
    return num_shards * (_ALIGNMENT_BYTES // min(dtype.itemsize, _HALF_FORMAT_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """Layout information of a parameter.

    Attributes:
        shape: Shape of the full parameter.
        dtype: Dtype in the chunk.
        trains: If False, the parameter is frozen.
    """

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
        in_shard: Range in the rank's shard.
    """

    region_index: int
    span: tuple[int, int]
    in_shard: slice


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Layout of one chunk. See Note [Chunk layout].

    Attributes:
        dtype: Dtype of all its parameters.
        trains: If False, the parameters are frozen, and the chunk has neither gradients nor states.
        numel: Number of elements, including waste.
        num_shards: Number of equal shards.
        regions: Regions of the parameters, in order.
        num_bytes: Bytes of the gathered chunk.
    """

    dtype: torch.dtype
    trains: bool
    numel: int
    num_shards: int
    regions: tuple[ParamRegion, ...]
    num_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the sizes, because a wrong one would only show as wrong values on some ranks."""
        object.__setattr__(self, "num_bytes", self.numel * self.dtype.itemsize)
        unit = unit_numel(self.dtype, self.num_shards)
        assert self.numel % unit == 0, f"a chunk of {self.numel} elements is not a multiple of {unit}"
        end = self.regions[-1].stop if self.regions else 0
        assert end <= self.numel, f"{end} elements in a chunk of {self.numel}"

    @property
    def shard_numel(self) -> int:
        """Number of elements that each rank owns, including waste."""
        return self.numel // self.num_shards

    @property
    def used_numel(self) -> int:
        """Number of parameter elements."""
        return sum(region.stop - region.start for region in self.regions)

    @property
    def padding(self) -> list[slice]:
        """Ranges of elements that belong to no parameter, in order."""
        starts = [*(region.start for region in self.regions), self.numel]
        stops = [0, *(region.stop for region in self.regions)]
        return [slice(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    def shard_range(self, rank: int) -> slice:
        """Return the range of the chunk that a rank of the shard group owns."""
        assert 0 <= rank < self.num_shards, f"rank {rank} of {self.num_shards} shards"
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def parts(self, rank: int) -> list[ShardRegionInChunk]:
        """Return the regions that a rank of the shard group owns, in order, without empty ones."""
        owned = self.shard_range(rank)
        parts = []
        for index, region in enumerate(self.regions):
            start, stop = max(region.start, owned.start), min(region.stop, owned.stop)
            if start < stop:
                part = ShardRegionInChunk(
                    region_index=index,
                    span=(start - region.start, stop - region.start),
                    in_shard=slice(start - owned.start, stop - owned.start),
                )
                parts.append(part)
        return parts


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All chunks of a model.

    Attributes:
        chunks: Chunks, in the order of the first parameter in each.
        chunk_numel: Number of elements of a chunk; the last chunk of a kind and chunks of one parameter may differ.
    """

    chunks: tuple[ChunkLayout, ...]
    chunk_numel: int

    @property
    def wasted_numel(self) -> int:
        """Number of elements of the chunks that belong to no parameter."""
        return sum(chunk.numel - chunk.used_numel for chunk in self.chunks)

    def describe(self) -> str:
        """Return one line for a log."""
        chunks = "1 chunk" if len(self.chunks) == 1 else f"{len(self.chunks)} chunks"
        used, wasted = sum(chunk.used_numel for chunk in self.chunks), self.wasted_numel
        ratio = wasted / max(1, used + wasted)
        return f"{chunks} for {used:,} elements of parameters, and {wasted:,} unused ({ratio:.2%})"


# Note [Filling chunks]
# Parameters are sorted by first use, so a chunk holds parameters that are used together. Each kind (dtype, trained or
# frozen) has at most one open chunk. A parameter that does not fit closes it and opens the next; the free elements of
# the closed chunk are waste. Closed chunks have the common size, because their gathered copies share buffers. The last
# chunk of a kind is truncated to its content.
# - A parameter larger than a chunk, or an outlier, gets a separate chunk. The open chunk stays open: small parameters
#   before and after an embedding table share a chunk.
# - Consecutive parameters of one module stay together if a chunk can hold them, so that a layer's bias never requires
#   a second all-gather.
# - Parameters without elements need no memory: they follow the previous parameter of their kind.
# All decisions depend on sizes and order only, so all ranks compute the same chunks without communication.

# Note [Chunk search]
# The chunk size is searched as in PatrickStar (Fang et al. 2021, arXiv:2108.05818): candidates lie a step apart between
# the smallest and the largest allowed size, and the one with the least waste wins. Outliers are excluded, because they
# would penalize sizes that hold an outlier and little else. Filling is linear in the parameters and vectorized over the
# candidates: 3000 parameters and 1000 candidates take about 0.03 seconds.
_MAX_CANDIDATES = 10_000

# Outliers are larger than the mean by this number of standard deviations; of few parameters both mean little.
_OUTLIER_DEVIATIONS = 3
_MIN_PARAMETERS_FOR_OUTLIERS = 8

_STEP_WITHOUT_MATRICES = 1024

_Numels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of the search, an input of `plan_chunks`.

    Attributes:
        chunk_numel: Number of elements of a chunk.
        waste: Number of wasted elements by candidate, in ascending order of the candidates.
        outlier_numel: Parameters with more elements have separate chunks; None without outliers.
    """

    chunk_numel: int
    waste: dict[int, int]
    outlier_numel: int | None


@dataclass(slots=True)
class _ParamGroup:
    """Parameters that may share a chunk, as indices.

    Attributes:
        unit: Number of elements that a chunk size is a multiple of.
        runs: Consecutive parameters of one module, which stay together if possible.
        outliers: Parameters with dedicated chunks.
        empty: Parameters without elements.
    """

    dtype: torch.dtype
    trains: bool
    unit: int
    runs: list[list[int]] = field(default_factory=list)
    outliers: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _ChunkDraft:
    """Draft of a chunk: indices of its parameters, and its size once it is closed."""

    indices: list[int]
    numel: int


def plan_chunks(
    parameters: Sequence[ParamInfo],
    *,
    num_shards: int,
    chunk_numel: int,
    module_of: Sequence[int] | None = None,
    outlier_numel: int | None = None,
) -> ChunkPlan:
    """Return the chunks of a model. See Note [Filling chunks].

    *Collective: no.* The same arguments give the same chunks on every rank.

    Args:
        parameters: Parameters in the order of first use; a tied parameter occurs once.
        num_shards: Number of ranks that share a chunk.
        chunk_numel: Number of elements of a chunk, rounded up to equal and aligned shards.
        module_of: Index of the module that directly holds each parameter. Consecutive parameters of a module share a
            chunk if possible. Optional, defaults to one module per parameter.
        outlier_numel: Parameters with more elements have separate chunks.
    """
    numels = [parameter.numel for parameter in parameters]
    kinds, unit = _kinds(parameters, numels, num_shards, module_of, outlier_numel)
    chunk_numel = _round_up(chunk_numel, unit)
    aligned = _aligned(numels)
    drafts = [(draft, kind) for kind in kinds for draft in _fill(kind, aligned, chunk_numel)]
    drafts.sort(key=lambda pair: pair[0].indices[0])
    chunks = []
    for draft, kind in drafts:
        regions, start = [], 0
        for index in draft.indices:
            regions.append(ParamRegion(index, parameters[index].shape, start, start + numels[index]))
            start += aligned[index]
        chunks.append(ChunkLayout(kind.dtype, kind.trains, draft.numel, num_shards, tuple(regions)))
    return ChunkPlan(tuple(chunks), chunk_numel)


def search_chunk_numel(
    parameters: Sequence[ParamInfo],
    *,
    num_shards: int,
    search_range_numel: int,
    min_chunk_numel: int,
    step_numel: int,
    module_of: Sequence[int] | None = None,
) -> SearchResult:
    """Return the chunk size with the least waste, the smallest of several.

    See Note [Chunk search].

    *Collective: no.* The same arguments give the same size on every rank.

    Candidates lie `step_numel` apart and are rounded up to equal and aligned shards; the step is at least that
    alignment. More than 10000 candidates are thinned out evenly. No candidate exceeds the total size of the largest
    kind of parameters: a model smaller than `min_chunk_numel` has one chunk of its exact size per kind.

    Args:
        parameters: Parameters in the order of first use; a tied parameter occurs once.
        num_shards: Number of ranks that share a chunk.
        search_range_numel: Difference between the largest and the smallest candidate.
        min_chunk_numel: Smallest candidate.
        step_numel: Difference between candidates, see `default_step`.
        module_of: Index of the module that directly holds each parameter; see `plan_chunks`.
    """
    numels = [parameter.numel for parameter in parameters]
    outlier_numel = _outlier_numel(numels, min_chunk_numel)
    kinds, unit = _kinds(parameters, numels, num_shards, module_of, outlier_numel)
    aligned = _aligned(numels)
    largest = max((sum(aligned[index] for run in kind.runs for index in run) for kind in kinds if kind.runs), default=1)
    candidates = _candidates(min_chunk_numel, search_range_numel, step_numel, unit, _round_up(largest, unit))
    held = np.zeros_like(candidates)
    for kind in kinds:
        held += _held(kind, aligned, candidates)
    waste = held - sum(numels)
    return SearchResult(
        chunk_numel=int(candidates[np.argmin(waste)]),
        waste=dict(zip(candidates.tolist(), waste.tolist(), strict=True)),
        outlier_numel=outlier_numel,
    )


def default_step(parameters: Iterable[ParamInfo]) -> int:
    """Return the default step of the search: the most frequent last dimension of the matrices.

    In a transformer this is the hidden dimension, a divisor of nearly all parameter sizes. The smallest of several;
    1024 for a model without matrices. Convolution kernels are excluded because their last dimension is tiny.
    """
    counts = Counter(info.shape[1] for info in parameters if len(info.shape) == 2 and info.numel)
    return min(counts, key=lambda dimension: (-counts[dimension], dimension), default=_STEP_WITHOUT_MATRICES)


def _outlier_numel(numels: Sequence[int], min_chunk_numel: int) -> int | None:
    """Return the size above which parameters are outliers, from integer sums, which are exact on all ranks."""
    if len(numels) < _MIN_PARAMETERS_FOR_OUTLIERS:
        return None
    total, squares = sum(numels), sum(numel * numel for numel in numels)
    spread = math.sqrt(len(numels) * squares - total * total)
    limit = max(min_chunk_numel, math.floor((total + _OUTLIER_DEVIATIONS * spread) / len(numels)))
    return limit if max(numels) > limit else None


def _kinds(
    parameters: Sequence[ParamInfo],
    numels: Sequence[int],
    num_shards: int,
    module_of: Sequence[int] | None,
    outlier_numel: int | None,
) -> tuple[list[_ParamGroup], int]:
    """Return the parameters by kind, in the order of each kind's first parameter, and the largest unit.

    A unit is a power of two times the number of shards, so the largest one is a common multiple.
    """
    assert module_of is None or len(module_of) == len(parameters), "module_of has one number for each parameter"
    kinds: dict[tuple[torch.dtype, bool], _ParamGroup] = {}
    for index, (info, numel) in enumerate(zip(parameters, numels, strict=True)):
        key = (info.dtype, info.trains)
        kind = kinds.setdefault(key, _ParamGroup(*key, unit_numel(info.dtype, num_shards)))
        if numel == 0:
            kind.empty.append(index)
        elif outlier_numel is not None and numel > outlier_numel:
            kind.outliers.append(index)
        elif module_of is not None and kind.runs and module_of[kind.runs[-1][0]] == module_of[index]:
            kind.runs[-1].append(index)
        else:
            kind.runs.append([index])
    common_unit = max((kind.unit for kind in kinds.values()), default=unit_numel(torch.float32, num_shards))
    return list(kinds.values()), common_unit


def _fill(kind: _ParamGroup, numels: Sequence[int], chunk_numel: int) -> list[_ChunkDraft]:
    """Return the chunks of a kind. See Note [Filling chunks]; `_held` is the version for many sizes."""
    drafts = [_ChunkDraft([index], _round_up(numels[index], kind.unit)) for index in kind.outliers]
    # As if a full chunk were open: the first parameter opens the first one.
    last, used = _ChunkDraft([], chunk_numel), chunk_numel
    for run in kind.runs:
        fits = sum(numels[index] for index in run) <= chunk_numel
        for group in [run] if fits else [[index] for index in run]:
            numel = sum(numels[index] for index in group)
            if numel > chunk_numel:
                drafts.append(_ChunkDraft(group, _round_up(numel, kind.unit)))
                continue
            if used + numel > chunk_numel:
                last, used = _ChunkDraft([], chunk_numel), 0
                drafts.append(last)
            last.indices += group
            used += numel
    last.numel = _round_up(used, kind.unit)
    if not drafts:
        # One unit rather than nothing: a chunk without elements would be a case of its own everywhere.
        drafts.append(_ChunkDraft([], kind.unit))
    _add_empty(kind, drafts)
    return drafts


def _add_empty(kind: _ParamGroup, drafts: list[_ChunkDraft]) -> None:
    """Insert each parameter without elements after its predecessor, or into the first chunk of the kind."""
    full = sorted((index, number) for number, draft in enumerate(drafts) for index in draft.indices)
    position = 0
    for empty in kind.empty:
        while position + 1 < len(full) and full[position + 1][0] < empty:
            position += 1
        drafts[full[position][1] if full else 0].indices.append(empty)
    for draft in drafts:
        draft.indices.sort()


def _candidates(smallest: int, search_range: int, step: int, unit: int, largest: int) -> _Numels:
    """Return the candidate sizes, ascending and unique."""
    step = max(step, unit)
    step *= -(-(search_range // step + 1) // _MAX_CANDIDATES)
    sizes = np.arange(smallest, smallest + search_range + 1, step, dtype=np.int64)
    return np.unique(np.minimum(-(-sizes // unit) * unit, largest))


def _held(kind: _ParamGroup, numels: Sequence[int], candidates: _Numels) -> _Numels:
    """Return the total number of elements of a kind's chunks, including waste, for each candidate. See `_fill`.

    Candidates ascend, so those that can hold a parameter or a run are a slice at the end.
    """
    held, left = np.zeros_like(candidates), np.zeros_like(candidates)
    for run in kind.runs:
        total = sum(numels[index] for index in run)
        together = int(np.searchsorted(candidates, total))
        _put(total, slice(together, None), candidates, held, left)
        if together == 0:
            continue
        for index in run:
            fits = int(np.searchsorted(candidates, numels[index]))
            held[:fits] += _round_up(numels[index], kind.unit)
            _put(numels[index], slice(fits, together), candidates, held, left)
    held -= left // kind.unit * kind.unit
    held += sum(_round_up(numels[index], kind.unit) for index in kind.outliers)
    return held if kind.runs or kind.outliers else held + kind.unit


def _put(numel: int, where: slice, candidates: _Numels, held: _Numels, left: _Numels) -> None:
    """Add a parameter to the open chunk with `left` free elements, or to a new one if it does not fit."""
    sizes, free = candidates[where], left[where]
    opens = free < numel
    np.add(held[where], sizes, out=held[where], where=opens)
    np.copyto(free, sizes, where=opens)
    free -= numel


def _aligned(numels: Sequence[int]) -> list[int]:
    """Return the distances of parameters to those that follow them. See Note [Chunk layout]."""
    return [_round_up(numel, _PARAM_ALIGNMENT) for numel in numels]


def _round_up(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit
