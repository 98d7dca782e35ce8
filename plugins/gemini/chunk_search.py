"""Chunk search: parameters of each chunk, and the chunk size with the least waste; pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from booster.errors import ConfigError

from .chunk_layout import ChunkLayout, ChunkPlan, ParamInfo, ParamRegion, WasteReport, unit_numel

# Note [Filling chunks]
# Parameters come in the order of their first use, so that a chunk holds what is used at about the same time. Each kind
# (dtype, trained or frozen) has at most one open chunk. What doesn't fit into it closes it and opens the next;
# the free elements of the closed one are waste. Closed chunks keep the common size, as their gathered copies share
# buffers. The last one of a kind is cut to what it holds.
# - What has a chunk of its own: a parameter larger than a chunk, and an outlier. It leaves the open chunk open: small
#   parameters before and after an embedding table share a chunk.
# - Neighbours of one module stay together where one chunk can hold them: else a layer's bias could be the only reason
#   to gather a second chunk.
# - Parameters without elements need no memory: they lie behind the parameter of their kind that comes before them.
# Every decision depends on sizes and order alone, so all ranks come to the same chunks without a word.

# Note [Chunk search]
# The size is found as in PatrickStar (Fang et al. 2021, arXiv:2108.05818): sizes from the least to the largest allowed,
# a step apart, each is filled and its waste counted, and the least waste wins. Outliers take no part: they would make
# sizes that hold them beside little else look bad. The filling is linear in the parameters; it runs for all candidates
# at once, as vector operations over the candidates. 3000 parameters and 1000 candidates take about 0.03 seconds.
_MAX_CANDIDATES = 10_000

# Of fewer sizes than this a mean and a deviation say little.
_MIN_PARAMETERS_FOR_OUTLIERS = 8

_STEP_WITHOUT_MATRICES = 1024

_Numels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The size that was found; `plan_chunks` takes both numbers.

    Attributes:
        chunk_numel: Elements of a chunk.
        waste: Elements of no parameter in all chunks, by candidate, in ascending order of the candidates.
        outlier_numel: Parameters with more elements than this have chunks of their own. None where there are none.
    """

    chunk_numel: int
    waste: dict[int, int]
    outlier_numel: int | None


@dataclass(slots=True)
class _ParamGroup:
    """Parameters that may share a chunk, as indices.

    Attributes:
        unit: Elements that the size of a chunk is a multiple of.
        runs: Neighbours that stay together where they can: the parameters of one module.
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
        parameters: In the order of their first use. A tied parameter is there once.
        num_shards: Ranks that share a chunk.
        chunk_numel: Elements of a chunk. Rounded up so that the pieces of all ranks are equal and aligned.
        module_of: Of each parameter, the number of the module that it is a direct parameter of. Parameters of a module
            that follow each other are in one chunk, if one can hold them. Where None, each is on its own.
        outlier_numel: Parameters with more elements than this have chunks of their own.

    Raises:
        ConfigError: Chunks of no elements.
    """
    if chunk_numel < 1:
        raise ConfigError(f"a chunk of {chunk_numel} elements can hold no parameter: give a size of 1 or more")
    numels = [parameter.numel for parameter in parameters]
    kinds = _kinds(parameters, numels, num_shards, module_of, outlier_numel)
    chunk_numel = _round_up(chunk_numel, _common_unit(kinds, num_shards))
    drafts = [(draft, kind) for kind in kinds for draft in _fill(kind, numels, chunk_numel)]
    drafts.sort(key=lambda pair: pair[0].indices[0])
    chunks = tuple(
        ChunkLayout(kind.dtype, kind.trains, draft.numel, num_shards, _places(parameters, draft.indices))
        for draft, kind in drafts
    )
    wasted = sum(chunk.waste_numel for chunk in chunks)
    return ChunkPlan(chunks, chunk_numel, WasteReport(num_chunks=len(chunks), used=sum(numels), wasted=wasted))


def search_chunk_numel(
    parameters: Sequence[ParamInfo],
    *,
    num_shards: int,
    search_range_numel: int,
    min_chunk_numel: int,
    step_numel: int,
    module_of: Sequence[int] | None = None,
    num_outlier_deviations: float = 3.0,
) -> SearchResult:
    """Return the size of chunks that leaves the least elements unused, the smallest of several.

    See Note [Chunk search].

    *Collective: no.* The same arguments give the same size on every rank.

    Candidates lie `step_numel` apart and are rounded up so that pieces are equal and aligned; a step is at least that
    rounding. Where there would be more than 10000, the step is multiplied so that they cover the range evenly. None is
    larger than what the largest kind of parameters needs in all: a model that is smaller than `min_chunk_numel` has one
    chunk of just its size per kind.

    Args:
        parameters: As `plan_chunks` takes them, as are `num_shards` and `module_of`.
        num_shards: Ranks that share a chunk.
        search_range_numel: Elements by which the largest candidate may exceed the smallest.
        min_chunk_numel: Elements of the smallest candidate.
        step_numel: Elements between candidates, see `default_step`.
        module_of: Numbers of modules.
        num_outlier_deviations: A parameter is an outlier if it is larger than `min_chunk_numel` and than the mean of
            all sizes plus so many standard deviations. With fewer than 8 parameters there are none.

    Raises:
        ConfigError: Numbers that give no candidates.
    """
    _check_search(search_range_numel, min_chunk_numel, step_numel, num_outlier_deviations)
    numels = [parameter.numel for parameter in parameters]
    outlier_numel = _outlier_numel(numels, min_chunk_numel, num_outlier_deviations)
    kinds = _kinds(parameters, numels, num_shards, module_of, outlier_numel)
    unit = _common_unit(kinds, num_shards)
    largest = max((_total(numels, index) for kind in kinds if (index := _flat(kind.runs))), default=1)
    candidates = _candidates(min_chunk_numel, search_range_numel, step_numel, unit, _round_up(largest, unit))
    held = np.zeros_like(candidates)
    for kind in kinds:
        held += _held(kind, numels, candidates)
    waste = held - sum(numels)
    return SearchResult(
        chunk_numel=int(candidates[np.argmin(waste)]),
        waste=dict(zip(candidates.tolist(), waste.tolist(), strict=True)),
        outlier_numel=outlier_numel,
    )


def default_step(parameters: Iterable[ParamInfo]) -> int:
    """Return the step of the search for a user who names none: the most frequent last dimension of the matrices.

    In a transformer that is the hidden dimension, which divides the sizes of nearly all parameters. The smallest of
    several; 1024 for a model without matrices. Kernels of convolutions don't count: their last dimension is tiny.

    Args:
        parameters: Parameters of the model, in any order.
    """
    counts = Counter(facts.shape[1] for facts in parameters if len(facts.shape) == 2 and facts.numel)
    return min(counts, key=lambda dimension: (-counts[dimension], dimension), default=_STEP_WITHOUT_MATRICES)


def _check_search(search_range: int, smallest: int, step: int, deviations: float) -> None:
    if search_range < 0:
        raise ConfigError(f"a search range of {search_range} elements has no sizes in it: give 0 or more")
    if smallest < 1:
        raise ConfigError(f"chunks of at least {smallest} elements: the smallest size must be 1 or more")
    if step < 1:
        raise ConfigError(f"sizes {step} elements apart never reach the end of the range: give a step of 1 or more")
    if not deviations > 0:
        raise ConfigError(f"{deviations} deviations make outliers of common parameters: give more than 0, such as 3")


def _outlier_numel(numels: Sequence[int], min_chunk_numel: int, deviations: float) -> int | None:
    """Return the size above which parameters are outliers. Sums of integers: no rank may differ in the last digit."""
    if len(numels) < _MIN_PARAMETERS_FOR_OUTLIERS or math.isinf(deviations):
        return None
    total, squares = sum(numels), sum(numel * numel for numel in numels)
    spread = math.sqrt(len(numels) * squares - total * total)
    limit = max(min_chunk_numel, math.floor((total + deviations * spread) / len(numels)))
    return limit if max(numels) > limit else None


def _kinds(
    parameters: Sequence[ParamInfo],
    numels: Sequence[int],
    num_shards: int,
    module_of: Sequence[int] | None,
    outlier_numel: int | None,
) -> list[_ParamGroup]:
    """Sort parameters into kinds, in the order of the first of each kind."""
    assert module_of is None or len(module_of) == len(parameters), "module_of has one number for each parameter"
    kinds: dict[tuple[torch.dtype, bool], _ParamGroup] = {}
    for index, (facts, numel) in enumerate(zip(parameters, numels, strict=True)):
        key = (facts.dtype, facts.trains)
        kind = kinds.setdefault(key, _ParamGroup(*key, unit_numel(facts.dtype, num_shards)))
        if numel == 0:
            kind.empty.append(index)
        elif outlier_numel is not None and numel > outlier_numel:
            kind.outliers.append(index)
        elif module_of is not None and kind.runs and module_of[kind.runs[-1][0]] == module_of[index]:
            kind.runs[-1].append(index)
        else:
            kind.runs.append([index])
    return list(kinds.values())


def _fill(kind: _ParamGroup, numels: Sequence[int], chunk_numel: int) -> list[_ChunkDraft]:
    """Return the chunks of a kind. See Note [Filling chunks]; `_held` is the same for many sizes at once."""
    drafts = [_ChunkDraft([index], _round_up(numels[index], kind.unit)) for index in kind.outliers]
    last, used = (
        _ChunkDraft([], chunk_numel),
        chunk_numel,
    )  # as if a full one were open: the first parameter opens the first
    for group in _groups(kind, numels, chunk_numel):
        numel = _total(numels, group)
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


def _groups(kind: _ParamGroup, numels: Sequence[int], chunk_numel: int) -> Iterator[list[int]]:
    """Yield what goes into a chunk together: a module's parameters, or one where all are too large for a chunk."""
    for run in kind.runs:
        if _total(numels, run) <= chunk_numel:
            yield list(run)
        else:
            yield from ([index] for index in run)


def _add_empty(kind: _ParamGroup, drafts: list[_ChunkDraft]) -> None:
    """Put each parameter without elements behind the one that comes before it, or to the first one of the kind."""
    full = sorted((index, number) for number, draft in enumerate(drafts) for index in draft.indices)
    position = 0
    for empty in kind.empty:
        while position + 1 < len(full) and full[position + 1][0] < empty:
            position += 1
        drafts[full[position][1] if full else 0].indices.append(empty)
    for draft in drafts:
        draft.indices.sort()


def _places(parameters: Sequence[ParamInfo], indices: Sequence[int]) -> tuple[ParamRegion, ...]:
    places, start = [], 0
    for index in indices:
        stop = start + parameters[index].numel
        places.append(ParamRegion(index, parameters[index].shape, start, stop))
        start = stop
    return tuple(places)


def _candidates(smallest: int, search_range: int, step: int, unit: int, largest: int) -> _Numels:
    """Return sizes to try, ascending, each once."""
    step = max(step, unit)
    step *= -(-(search_range // step + 1) // _MAX_CANDIDATES)
    sizes = np.arange(smallest, smallest + search_range + 1, step, dtype=np.int64)
    return np.unique(np.minimum(-(-sizes // unit) * unit, largest))


def _held(kind: _ParamGroup, numels: Sequence[int], candidates: _Numels) -> _Numels:
    """Return the elements of all chunks of a kind, waste included, for each candidate. See `_fill`.

    Candidates ascend. So those that can hold a parameter, or a run of them, are a slice at the end.
    """
    held, left = np.zeros_like(candidates), np.zeros_like(candidates)
    for run in kind.runs:
        together = int(np.searchsorted(candidates, _total(numels, run)))
        _put(_total(numels, run), slice(together, None), candidates, held, left)
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
    """Add a parameter to the open chunk, or to a new one if it does not fit; `left`: free elements of the open one."""
    sizes, free = candidates[where], left[where]
    opens = free < numel
    np.add(held[where], sizes, out=held[where], where=opens)
    np.copyto(free, sizes, where=opens)
    free -= numel


def _common_unit(kinds: Sequence[_ParamGroup], num_shards: int) -> int:
    """Return what chunks of every kind can be a multiple of: the units are powers of two times the shards."""
    return max((kind.unit for kind in kinds), default=unit_numel(torch.float32, num_shards))


def _flat(runs: Iterable[Sequence[int]]) -> list[int]:
    return [index for run in runs for index in run]


def _total(numels: Sequence[int], indices: Iterable[int]) -> int:
    return sum(numels[index] for index in indices)


def _round_up(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit
