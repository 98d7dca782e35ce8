"""Placement policies, evictions, and the trace of an iteration, in which they look ahead."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from booster.errors import ConfigError
from booster.validation import is_count, is_non_nan_number

# Note [Which chunks are offloaded]
# All policies offload the chunks that forward uses last, full chunks from the end. Forward needs the first chunks right
# after the step, too early to hide their transfer from the offload tier; the transfer of the last ones overlaps with
# the forward. In backward, gradients of the last chunks are complete first, and their transfer overlaps with the rest
# of backward. For the same reason, the first chunks are those that stay gathered. Before the first iteration, the
# assumed order of use is that of the chunk indices.
# To compute, a rank needs the weights of a module's chunks and a gradient buffer for each trained one. No policy
# assigns less, and never less than the weights and the gradient buffer of the largest chunk, because an iteration that
# deviates from its trace may need any chunk at any time. If a budget is too small for `max_prefetch` more chunks, fewer
# are prefetched. If it is too small for the minimum, ConfigError is raised.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Bytes of a chunk on this rank.

    Attributes:
        gathered: Gathered weights; a gradient buffer has the same size.
        weights: This rank's shard of the weights.
        gradients: This rank's shard of the gradients; 0 for a frozen chunk.
        states: This rank's shard of optimizer states and masters; an estimate before the first step.
    """

    gathered: int
    weights: int
    gradients: int
    states: int

    @property
    def trains(self) -> bool:
        """Whether the chunk has gradients."""
        return self.gradients > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLocations:
    """Locations of chunks, by index. Everything else is in the compute tier.

    Attributes:
        weights: Chunks with weight and gradient shards in the offload tier.
        states: Chunks with optimizer states in the offload tier; no frozen chunks.
        kept_gathered: Chunks that always stay gathered; disjoint from `weights`.
    """

    weights: frozenset[int] = frozenset()
    states: frozenset[int] = frozenset()
    kept_gathered: frozenset[int] = frozenset()


def resident_bytes(sizes: Sequence[ChunkBytes], locations: ChunkLocations) -> int:
    """Return the bytes of model data that are always in the compute tier: shards and chunks kept gathered."""
    weights = sum(size.weights + size.gradients for chunk, size in enumerate(sizes) if chunk not in locations.weights)
    states = sum(size.states for chunk, size in enumerate(sizes) if chunk not in locations.states)
    return weights + states + sum(sizes[chunk].gathered for chunk in locations.kept_gathered)


def all_gathered_bytes(sizes: Sequence[ChunkBytes]) -> int:
    """Return the bytes of all weights and all gradient buffers."""
    return sum(size.gathered * (2 if size.trains else 1) for size in sizes)


def largest_gathered(sizes: Sequence[ChunkBytes], kept: Set[int]) -> int:
    """Return the gathered bytes of the largest chunk that is not kept gathered, or 0."""
    return max((size.gathered for chunk, size in enumerate(sizes) if chunk not in kept), default=0)


def min_gather_bytes(sizes: Sequence[ChunkBytes], kept: Set[int], event: TraceEvent | None) -> int:
    """Return the minimum bytes of gathered weights and gradient buffers that a rank needs to compute at an event.

    None for the maximum over all events. Of kept chunks, which stay gathered, only the gradient buffers count.
    """
    least = largest_gathered(sizes, kept) + max((size.gathered for size in sizes if size.trains), default=0)
    if event is None:
        return least
    needed = sum(sizes[chunk].gathered for chunk in event.chunks if chunk not in kept)
    if event.is_backward:
        needed += sum(sizes[chunk].gathered for chunk in event.chunks if sizes[chunk].trains)
    return max(least, needed)


def min_budget_bytes(
    sizes: Sequence[ChunkBytes], kept: Set[int], trace: Trace | None, *, counts_others: bool = True
) -> int:
    """Return the maximum over all events of the minimum gather bytes, and of memory that is not model data with them.

    Without `counts_others` activations and temporaries are left out.
    """
    most = min_gather_bytes(sizes, kept, None)
    for now, event in enumerate(trace.events if trace is not None else ()):
        others = other_bytes_at(trace, now) if counts_others else 0
        most = max(most, min_gather_bytes(sizes, kept, event) + others)
    return most


def event_at(trace: Trace | None, now: int) -> TraceEvent | None:
    """Return an event, or None if the trace lacks it."""
    return trace.events[now] if trace is not None and now < len(trace.events) else None


def other_bytes_at(trace: Trace | None, now: int) -> int:
    """Return the peak of activations and temporaries at an event and the next, between which nothing is evicted."""
    return 0 if trace is None else trace.peak_other_bytes(now, now + 2)


def last_of(chunks: Iterable[int], sizes: Sequence[ChunkBytes], fraction: float) -> frozenset[int]:
    """Return the last chunks, in the order of use, with at least a fraction of the gathered bytes of all given ones."""
    numbers = list(chunks)
    missing = _exactly(fraction) * sum(sizes[chunk].gathered for chunk in numbers)
    taken = []
    while missing > 0:
        taken.append(numbers.pop())
        missing -= sizes[taken[-1]].gathered
    return frozenset(taken)


def fit_to_budget(
    num_bytes: int,
    sizes: Sequence[ChunkBytes],
    trace: Trace | None,
    *,
    max_prefetch: int,
    state_ratio: float = 1.0,
) -> ChunkLocations:
    """Return locations within a budget: reserve memory for prefetched chunks, then for weights, gradients and states.

    Args:
        num_bytes: Free bytes of the compute tier after the minimum gather bytes and all other memory.
        sizes: Sizes of the chunks, by index.
        trace: Trace of an iteration with the order of use; optional, defaults to the order of the indices.
        max_prefetch: Maximum number of prefetched chunks to reserve memory for.
        state_ratio: Maximum fraction of the remaining memory for states.
    """
    largest = largest_gathered(sizes, frozenset())
    if largest:
        num_bytes -= largest * min(max_prefetch, num_bytes // largest)
    order = _order_of_use(sizes, trace)
    training = [chunk for chunk in order if sizes[chunk].trains]
    weights = _beyond(num_bytes, order, [sizes[chunk].weights + sizes[chunk].gradients for chunk in order])
    if weights:
        return ChunkLocations(weights=weights, states=frozenset(training))
    left = share_of(num_bytes - sum(size.weights + size.gradients for size in sizes), state_ratio)
    return ChunkLocations(states=_beyond(left, training, [sizes[chunk].states for chunk in training]))


def share_of(num_bytes: int, ratio: float) -> int:
    """Return a fraction of bytes, rounded down, with the ratio as a decimal number (0.9 is exactly 9/10)."""
    return int(num_bytes * _exactly(ratio))


def check_fit(budget: int, needed: int, *, resident: int = 0, ratio: float = 1.0) -> None:
    """Check that a budget is large enough.

    Args:
        budget: Bytes of the compute tier.
        needed: Bytes needed at one time for gathered chunks and memory that is not model data.
        resident: Bytes of shards and chunks kept gathered.
        ratio: Usable fraction of the budget.

    Raises:
        ConfigError: The budget is too small.
    """
    total = resident + needed
    if total <= share_of(budget, ratio):
        return
    stays = f" in addition to the {resident} bytes of shards and chunks kept gathered" if resident else ""
    changes = ["make chunks smaller (min_chunk_size_m)", "give smaller batches"]
    if resident:
        changes.append("offload more (offload_param_frac, offload_optim_frac) or keep less gathered (shard_param_frac)")
    raise ConfigError(
        f"device_memory_budget={budget} is too small: {needed} bytes are needed at once for the weights of one module's"
        f" chunks, their gradient buffers, activations and temporaries{stays}; give a device_memory_budget of at least"
        f" {math.ceil(total / _exactly(ratio))}, or {', or '.join(changes)}"
    )


def _exactly(ratio: float) -> Fraction:
    return Fraction(str(float(ratio)))


def _order_of_use(sizes: Sequence[ChunkBytes], trace: Trace | None) -> list[int]:
    """Return all chunk indices in the order of use; unused chunks come last."""
    if trace is None:
        return list(range(len(sizes)))
    first_uses = [trace.next_use(chunk, 0) for chunk in range(len(sizes))]
    return sorted(range(len(sizes)), key=lambda chunk: (first_uses[chunk] is None, first_uses[chunk] or 0))


def _beyond(num_bytes: int, chunks: Sequence[int], bytes_of: Sequence[int]) -> frozenset[int]:
    """Return the first chunk that does not fit and all chunks after it."""
    for index, shard_bytes in enumerate(bytes_of):
        num_bytes -= shard_bytes
        if num_bytes < 0:
            return frozenset(chunks[index:])
    return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(ABC):
    """Placement policy. All ranks of the shard group must pass equal arguments, because they gather chunks together.

    Attributes:
        budget: Bytes of the compute tier; None for no limit.
        max_prefetch: Number of chunks gathered ahead of their use.

    Raises:
        ConfigError: A number is out of range.
    """

    budget: int | None = None
    max_prefetch: int = 0

    def __post_init__(self) -> None:
        if not is_count(self.max_prefetch, minimum=0):
            raise ConfigError(
                f"max_prefetch={self.max_prefetch!r} is not a number of chunks: give an integer, such as 1, or 0 for"
                " none"
            )
        if self.budget is not None and not is_count(self.budget):
            raise ConfigError(
                f"device_memory_budget={self.budget!r} is not a number of bytes: give an integer above 0, such as"
                " 8 * 2**30, or None"
            )

    @property
    def offloads_all_states(self) -> bool:
        """Whether all optimizer states are in the offload tier, on all ranks and at any time."""
        return False

    @abstractmethod
    def locations(self, sizes: Sequence[ChunkBytes], trace: Trace | None) -> ChunkLocations:
        """Return the locations of all chunks, given their sizes by index, and the trace once there is one.

        Raises:
            ConfigError: The budget is too small for any placement.
        """

    @abstractmethod
    def gather_budget(
        self, sizes: Sequence[ChunkBytes], locations: ChunkLocations, trace: Trace | None, now: int
    ) -> int:
        """Return the maximum bytes of gathered chunks in the compute tier at an event, in O(chunks).

        Gathered weights and gradient buffers count, except the weights of chunks that are kept gathered.

        Args:
            sizes: Sizes of the chunks, by index.
            locations: Result of `locations` for the same sizes and trace.
            trace: Trace of an iteration, or None before the first.
            now: Event number; beyond the end of the trace, or without one, any event.

        Raises:
            ConfigError: The budget is too small for the minimum at this event.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlacement(Placement):
    """Policy with fixed fractions of sharded and offloaded chunks.

    Full chunks are selected from the end (Note [Which chunks are offloaded]) until their gathered bytes reach the
    fraction of all gathered bytes. The selection is independent of the trace, so nothing moves after the first
    iteration. The gather budget is `1 + max_prefetch` times the largest chunk, and a gradient buffer.

    Attributes:
        shard_param_frac: Fraction of the weights that are only gathered for use; the rest stays gathered.
        offload_optim_frac: Fraction of the trained chunks with optimizer states in the offload tier.
        offload_param_frac: Fraction of the weights (including frozen ones) in the offload tier, with their gradients;
            at most `shard_param_frac`.
    """

    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0

    def __post_init__(self) -> None:
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac"):
            _check_fraction(name, getattr(self, name))
        Placement.__post_init__(self)
        if self.offload_param_frac > self.shard_param_frac:
            raise ConfigError(
                f"offload_param_frac={self.offload_param_frac} is more than shard_param_frac={self.shard_param_frac}:"
                " weights that stay gathered can't be in the offload tier too; give a shard_param_frac of at least"
                f" {self.offload_param_frac}, such as 1.0"
            )

    @property
    def offloads_all_states(self) -> bool:
        return self.offload_optim_frac == 1.0

    def locations(self, sizes: Sequence[ChunkBytes], trace: Trace | None) -> ChunkLocations:
        chunks = range(len(sizes))
        training = [chunk for chunk in chunks if sizes[chunk].trains]
        locations = ChunkLocations(
            weights=last_of(chunks, sizes, self.offload_param_frac),
            states=last_of(training, sizes, self.offload_optim_frac),
            kept_gathered=frozenset(chunks) - last_of(chunks, sizes, self.shard_param_frac),
        )
        if self.budget is not None:
            resident = resident_bytes(sizes, locations)
            check_fit(self.budget, min_budget_bytes(sizes, locations.kept_gathered, trace), resident=resident)
        return locations

    def gather_budget(
        self, sizes: Sequence[ChunkBytes], locations: ChunkLocations, trace: Trace | None, now: int
    ) -> int:
        least = min_gather_bytes(sizes, locations.kept_gathered, event_at(trace, now))
        wanted = least + self.max_prefetch * largest_gathered(sizes, locations.kept_gathered)
        if self.budget is None:
            return wanted
        resident = resident_bytes(sizes, locations)
        other = other_bytes_at(trace, now)
        check_fit(self.budget, least + other, resident=resident)
        return min(wanted, self.budget - resident - other)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstPlacement(Placement):
    """Policy with a fixed budget for model data: gathered chunks first, then weights and gradients, then states.

    Shards are in the compute tier as far as they fit in addition to `2 + max_prefetch` gathered chunks, the rest in the
    offload tier. Activations and temporaries do not count.
    """

    def locations(self, sizes: Sequence[ChunkBytes], trace: Trace | None) -> ChunkLocations:
        if self.budget is None:
            return ChunkLocations()
        least = min_budget_bytes(sizes, frozenset(), trace, counts_others=False)
        check_fit(self.budget, least)
        return fit_to_budget(self.budget - least, sizes, trace, max_prefetch=self.max_prefetch)

    def gather_budget(
        self, sizes: Sequence[ChunkBytes], locations: ChunkLocations, trace: Trace | None, now: int
    ) -> int:
        if self.budget is None:
            return all_gathered_bytes(sizes)
        resident = resident_bytes(sizes, locations)
        check_fit(
            self.budget, min_gather_bytes(sizes, locations.kept_gathered, event_at(trace, now)), resident=resident
        )
        return self.budget - resident


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPlacement(Placement):
    """Policy that gives model data the memory left by activations and temporaries in the traced first iteration.

    In that iteration model data may use `1 - warmup_ratio` of the budget, but at least `2 + max_prefetch` gathered
    chunks, and is placed as by `ConstPlacement`. Later, everything together uses `steady_ratio` of the budget: shards
    are in the compute tier as far as they fit in addition to the peak of activations, temporaries and minimum gather
    bytes, and memory that is free at an event is for gathered chunks.

    Attributes:
        steady_ratio: Plugin argument `steady_cuda_cap_ratio`.
        warmup_ratio: Plugin argument `warmup_non_model_data_ratio`.
        gpu_margin_mem_ratio: Fraction of the memory left by weights and gradients for optimizer states; 0 for all of
            it.
    """

    steady_ratio: float = 0.9
    warmup_ratio: float = 0.8
    gpu_margin_mem_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check_fraction("steady_cuda_cap_ratio", self.steady_ratio)
        _check_fraction("warmup_non_model_data_ratio", self.warmup_ratio)
        _check_fraction("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio)
        Placement.__post_init__(self)
        if self.steady_ratio == 0:
            raise ConfigError(
                "steady_cuda_cap_ratio=0 leaves no memory to train in: give a number up to 1, such as 0.9"
            )

    def locations(self, sizes: Sequence[ChunkBytes], trace: Trace | None) -> ChunkLocations:
        if self.budget is None:
            return ChunkLocations()
        least = min_budget_bytes(sizes, frozenset(), trace)
        if trace is None:
            return fit_to_budget(self._warmup_bytes(sizes) - least, sizes, None, max_prefetch=self.max_prefetch)
        check_fit(self.budget, least, ratio=self.steady_ratio)
        return fit_to_budget(
            share_of(self.budget, self.steady_ratio) - least,
            sizes,
            trace,
            max_prefetch=self.max_prefetch,
            state_ratio=self.gpu_margin_mem_ratio or 1.0,
        )

    def gather_budget(
        self, sizes: Sequence[ChunkBytes], locations: ChunkLocations, trace: Trace | None, now: int
    ) -> int:
        if self.budget is None:
            return all_gathered_bytes(sizes)
        resident = resident_bytes(sizes, locations)
        if trace is None:
            return self._warmup_bytes(sizes) - resident
        other = other_bytes_at(trace, now)
        least = min_gather_bytes(sizes, locations.kept_gathered, event_at(trace, now))
        check_fit(self.budget, least + other, resident=resident, ratio=self.steady_ratio)
        return share_of(self.budget, self.steady_ratio) - resident - other

    def _warmup_bytes(self, sizes: Sequence[ChunkBytes]) -> int:
        """Return the bytes for model data before the first trace."""
        assert self.budget is not None
        least = min_gather_bytes(sizes, frozenset(), None)
        check_fit(self.budget, least)
        wanted = least + self.max_prefetch * largest_gathered(sizes, frozenset())
        return min(self.budget, max(wanted, self.budget - share_of(self.budget, self.warmup_ratio)))


def evictions(candidates: Mapping[int, int], next_use: Callable[[int], int | None], bytes_needed: int) -> list[int]:
    """Return the gathered chunks to evict, in order of eviction.

    Chunks that are never used again come first, then those with the farthest next use (L. A. Belady, A study of
    replacement algorithms for a virtual-storage computer, 1966). For chunks of equal size this is optimal.

    Args:
        candidates: Bytes of each chunk that may be evicted, by index.
        next_use: Function that returns the event of a chunk's next use, or None if there is none.
        bytes_needed: Number of bytes to free.

    Returns:
        The shortest prefix of that order that frees `bytes_needed`, or all chunks if that is not enough.
    """
    if bytes_needed <= 0:
        return []
    uses = [(next_use(chunk), chunk) for chunk in candidates]
    chosen: list[int] = []
    for _, chunk in sorted((-math.inf if use is None else -use, chunk) for use, chunk in uses):
        chosen.append(chunk)
        bytes_needed -= candidates[chunk]
        if bytes_needed <= 0:
            break
    return chosen


def _check_fraction(name: str, value: Any) -> None:
    if not is_non_nan_number(value) or not 0 <= value <= 1:
        raise ConfigError(f"{name}={value!r} is not a fraction: give a number from 0 to 1")


# The first iteration is traced as a sequence of module starts with the chunks that they need. Later iterations look
# ahead in it. They may deviate (conditional modules), so a lookup never affects results: a wrong guess only costs time.


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Start of a module's forward or backward, with its memory use.

    Attributes:
        chunks: Indices of the chunks that it needs, without duplicates.
        is_backward: True if gradients of the chunks are produced.
        other_bytes: Peak of memory that is not model data (activations and temporaries) in the compute tier, until the
            next event.
    """

    chunks: tuple[int, ...]
    is_backward: bool
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace of one iteration. Events are numbered from 0."""

    events: tuple[TraceEvent, ...]
    # Per chunk: the events that need it, ascending.
    _uses: dict[int, list[int]] = field(init=False, repr=False, compare=False)
    # Event and chunk of each use that does not merely continue the previous event's. Consecutive modules mostly use the
    # same chunk, so this is far shorter than the events.
    _arrivals: list[tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        uses: dict[int, list[int]] = {}
        arrivals = []
        for now, event in enumerate(self.events):
            for chunk in event.chunks:
                positions = uses.setdefault(chunk, [])
                if not positions or positions[-1] < now - 1:
                    arrivals.append((now, chunk))
                positions.append(now)
        object.__setattr__(self, "_uses", uses)
        object.__setattr__(self, "_arrivals", arrivals)

    def next_use(self, chunk: int, now: int) -> int | None:
        """Return the first event from `now` on that needs a chunk, in O(log n).

        A chunk without another use in this iteration gets its first use in the next one, whose event numbers continue
        this one's. So the results for two chunks are comparable. None for a chunk that is never used.
        """
        positions = self._uses.get(chunk)
        if positions is None:
            return None
        index = bisect_left(positions, now)
        return positions[index] if index < len(positions) else len(self.events) + positions[0]

    def upcoming(self, now: int, limit: int) -> list[int]:
        """Return the next chunks needed in this iteration from event `now` on, at most `limit`, in order of use."""
        found: dict[int, None] = {}
        if limit > 0:
            arrivals = range(bisect_left(self._arrivals, (now + 1, -1)), len(self._arrivals))
            current = self.events[now].chunks if now < len(self.events) else ()
            for chunk in chain(current, (self._arrivals[index][1] for index in arrivals)):
                found[chunk] = None
                if len(found) == limit:
                    break
        return list(found)

    def peak_other_bytes(self, now: int, until: int) -> int:
        """Return the largest `other_bytes` of the events in `[now, until)`, 0 if there are none."""
        return max((event.other_bytes for event in self.events[now:until]), default=0)


class Tracer:
    """Recorder of one iteration: the `record_*` methods, then `trace()`."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._early_bytes = 0

    def record_use(self, chunks: Iterable[int], is_backward: bool) -> None:
        """Record the start of a module's forward or backward that needs these chunks; duplicates are ignored."""
        self._events.append(
            TraceEvent(
                chunks=tuple(dict.fromkeys(chunks)),
                is_backward=is_backward,
                other_bytes=0 if self._events else self._early_bytes,
            )
        )

    def record_other_bytes(self, num_bytes: int) -> None:
        """Record the other memory in the compute tier; an event keeps its peak.

        Values from before the first event count for the first, as that memory is in use when its module starts.
        """
        if not self._events:
            self._early_bytes = max(self._early_bytes, num_bytes)
        elif num_bytes > self._events[-1].other_bytes:
            self._events[-1] = replace(self._events[-1], other_bytes=num_bytes)

    def trace(self) -> Trace:
        """Return the trace of the recorded iteration."""
        return Trace(tuple(self._events))


class Cursor:
    """Position in a trace during a later iteration, which may skip, repeat or add modules.

    The cursor does not move for a module that the trace lacks within the next `lookahead` events. Each miss extends the
    next search by another `lookahead` events. So the cursor catches up with an iteration that skips many modules, and
    never runs far ahead of one that repeats some.

    Args:
        trace: Trace to follow.
        lookahead: Search distance in events.

    Attributes:
        now: Number of the last event reached, initially 0.
    """

    def __init__(self, trace: Trace, lookahead: int = 64) -> None:
        self.trace = trace
        self._lookahead = lookahead
        self._positions: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for now, event in enumerate(trace.events):
            self._positions.setdefault((event.chunks, event.is_backward), []).append(now)
        self.restart()

    def restart(self) -> None:
        """Reset to the start of an iteration."""
        self.now = 0
        self._next = 0
        self._reach = self._lookahead

    def advance(self, chunks: Iterable[int], is_backward: bool) -> int:
        """Advance to the next event that needs the same chunks, in this order, and return its number."""
        positions = self._positions.get((tuple(dict.fromkeys(chunks)), is_backward), [])
        index = bisect_left(positions, self._next)
        if index < len(positions) and positions[index] < self._next + self._reach:
            self.now = positions[index]
            self._next = self.now + 1
            self._reach = self._lookahead
        else:
            self._reach += self._lookahead
        return self.now
