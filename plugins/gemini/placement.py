"""Policies that decide which memory tier chunks live in, how many are gathered, and which one goes. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from booster.errors import ConfigError

from .tracer import Trace, TraceEvent

# Note [Which chunks are offloaded]
# All policies offload those chunks first that forward uses last, whole chunks from the end. Forward begins with the
# weights of the first chunks, right after the step: nothing could hide their way back from the offload tier, while the
# last ones have the whole forward for it. Backward goes the other way round: the gradients of the last chunks are
# complete first and have the rest of backward for their way out. For the same reason the chunks that stay gathered are
# the first ones. Before the first iteration chunks are taken to be used in the order of their numbers.

# To compute at all a rank needs the weights of a module's chunks and a buffer for the gradients of each of them that
# trains. No policy gives less than that, and never less than the weights of one chunk and one gradient buffer, of the
# largest: an iteration that deviates from its record may need any chunk at any moment. Where a budget is too small for
# `max_prefetch` more payloads, fewer are prefetched. Where it is too small for the least, ConfigError is raised.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Bytes of a chunk on this rank.

    Attributes:
        gathered: All of its weights, gathered; a gradient buffer takes as much.
        weights: This rank's piece of them.
        gradients: This rank's piece of the gradient sums; 0: the chunk does not train.
        states: This rank's piece of the optimizer states, masters included; an estimate before the first step.
    """

    gathered: int
    weights: int
    gradients: int
    states: int

    @property
    def trains(self) -> bool:
        """It has gradients."""
        return self.gradients > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLocations:
    """Where chunks live, by number. What is not named lives in the compute tier.

    Attributes:
        weights: Chunks whose pieces of weights and gradients live in the offload tier.
        states: Chunks whose optimizer states live there; none that don't train.
        kept_gathered: Chunks that stay gathered all the time; none of `weights`.
    """

    weights: frozenset[int] = frozenset()
    states: frozenset[int] = frozenset()
    kept_gathered: frozenset[int] = frozenset()


def resident_shard_bytes(sizes: Sequence[ChunkBytes], locations: ChunkLocations) -> int:
    """Return how many bytes of pieces live in the compute tier."""
    weights = sum(size.weights + size.gradients for chunk, size in enumerate(sizes) if chunk not in locations.weights)
    return weights + sum(size.states for chunk, size in enumerate(sizes) if chunk not in locations.states)


def resident_bytes(sizes: Sequence[ChunkBytes], locations: ChunkLocations) -> int:
    """Return the bytes of model data that are in the compute tier at every moment: pieces and kept chunks."""
    return resident_shard_bytes(sizes, locations) + sum(sizes[chunk].gathered for chunk in locations.kept_gathered)


def all_gathered_bytes(sizes: Sequence[ChunkBytes]) -> int:
    """Return the bytes of all weights and all gradient buffers."""
    return sum(size.gathered * (2 if size.trains else 1) for size in sizes)


def largest_gathered(sizes: Sequence[ChunkBytes], kept: Set[int]) -> int:
    """Return the bytes of the largest payload among the chunks that don't stay gathered, 0 if there are none."""
    return max((size.gathered for chunk, size in enumerate(sizes) if chunk not in kept), default=0)


def min_gather_bytes(sizes: Sequence[ChunkBytes], kept: Set[int], event: TraceEvent | None) -> int:
    """Return the bytes of payloads without which a rank cannot compute.

    Args:
        sizes: Of each chunk, by number.
        kept: Chunks that stay gathered: their weights don't count, their gradient buffers do.
        event: When; None: at any moment.
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
    """Return the most that the least payloads take at any moment, with everything else that is not model data.

    Args:
        sizes: Of each chunk, by number.
        kept: Chunks that stay gathered.
        trace: Trace of an iteration, or None.
        counts_others: Activations and temporaries count.
    """
    most = min_gather_bytes(sizes, kept, None)
    for now, event in enumerate(trace.events if trace is not None else ()):
        others = other_bytes_at(trace, now) if counts_others else 0
        most = max(most, min_gather_bytes(sizes, kept, event) + others)
    return most


def event_at(trace: Trace | None, now: int) -> TraceEvent | None:
    """Return a moment, or None where the record has none."""
    return trace.events[now] if trace is not None and now < len(trace.events) else None


def other_bytes_at(trace: Trace | None, now: int) -> int:
    """Return what activations and temporaries take at a moment and the next: memory must not be reclaimed between."""
    return 0 if trace is None else trace.peak_other_bytes(now, now + 2)


def last_of(chunks: Iterable[int], sizes: Sequence[ChunkBytes], fraction: float) -> frozenset[int]:
    """Return the last chunks whose payloads are together at least a fraction of those of all the given ones.

    Args:
        chunks: Their numbers, in the order of their use.
        sizes: Of each chunk, by number.
        fraction: 0: none, 1: all.
    """
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
    """Return locations that fit: memory is left for prefetched chunks, then come weights, gradients and states.

    Args:
        num_bytes: What is free of the compute tier beside the least payloads and everything else.
        sizes: Of each chunk, by number.
        trace: Of an iteration, for the order of use; None: the order of the numbers.
        max_prefetch: Number of further gathered chunks that memory is left for, as far as they fit.
        state_ratio: Fraction of what weights leave that states may take.
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
    """Return a fraction of bytes, rounded down; the ratio is taken as it is written, 0.9 as nine tenths."""
    return int(num_bytes * _exactly(ratio))


def check_fit(budget: int, needed: int, *, resident: int = 0, ratio: float = 1.0) -> None:
    """Refuse a budget that is too small.

    Args:
        budget: Bytes of the compute tier.
        needed: Bytes that payloads and everything else need at a moment.
        resident: Bytes of pieces and kept chunks beside them.
        ratio: Fraction of the budget that may be used.

    Raises:
        ConfigError: They don't fit together.
    """
    total = resident + needed
    if total <= share_of(budget, ratio):
        return
    stays = f" beside the {resident} of the pieces and gathered chunks that stay in it" if resident else ""
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
    """Return the numbers of all chunks, those that are never used at the end."""
    if trace is None:
        return list(range(len(sizes)))

    def first_use(chunk: int) -> float:
        use = trace.next_use(chunk, 0)
        return math.inf if use is None else use

    return sorted(range(len(sizes)), key=first_use)


def _beyond(num_bytes: int, chunks: Sequence[int], bytes_of: Sequence[int]) -> frozenset[int]:
    """Return the chunks from the first one on that does not fit any more."""
    for index, shard_bytes in enumerate(bytes_of):
        num_bytes -= shard_bytes
        if num_bytes < 0:
            return frozenset(chunks[index:])
    return frozenset()


# What one policy alone looks at, with the defaults of `make_placement`.
_FRACTIONS = {"shard_param_frac": 1.0, "offload_optim_frac": 0.0, "offload_param_frac": 0.0}
_RATIOS = {"warmup_non_model_data_ratio": 0.8, "steady_cuda_cap_ratio": 0.9, "gpu_margin_mem_ratio": 0.0}


class Placement(Protocol):
    """A policy. All ranks of the shard group must ask with equal numbers, for they gather chunks together."""

    @property
    def name(self) -> str:
        """What users call it."""

    def locations(self, sizes: Sequence[ChunkBytes], trace: Trace | None) -> ChunkLocations:
        """Return where chunks live.

        Args:
            sizes: Of each chunk, by number.
            trace: Trace of an iteration, or None before the first.

        Raises:
            ConfigError: The budget is too small for any division.
        """

    def gather_budget(
        self, sizes: Sequence[ChunkBytes], locations: ChunkLocations, trace: Trace | None, now: int
    ) -> int:
        """Return how many bytes of payloads may be in the compute tier at a moment, in O(chunks).

        Gathered weights and gradient buffers count, the weights of chunks that stay gathered don't.

        Args:
            sizes: Of each chunk, by number.
            locations: What `locations` returned for the same sizes and the same record.
            trace: Trace of an iteration, or None before the first.
            now: Number of the moment in the record; at its end and beyond, or without one, any moment.

        Raises:
            ConfigError: The budget is too small for what must be there at this moment.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlacement:
    """Fixed fractions of the chunks are sharded and offloaded, whatever happens.

    Whole chunks are taken from the end (budgets.py, Note [Which chunks are offloaded]) until their payloads are at
    least the fraction of the sum of all payloads (0: none, 1: all). They don't depend on a record, so nothing moves
    after the first iteration. Payloads take `1 + max_prefetch` times the largest one, and a gradient buffer.

    Attributes:
        shard_param_frac: Fraction of the weights that are gathered for their use only; the rest stays gathered.
        offload_optim_frac: Fraction of the chunks that train whose optimizer states live in the offload tier.
        offload_param_frac: Fraction of the weights (frozen ones included) that live there with their gradients, at
            most `shard_param_frac`.
        max_prefetch: Number of chunks gathered ahead of their use.
        budget: Bytes of the compute tier for everything; None: enough.
        name: Name of the policy.

    Raises:
        ConfigError: A number that can't be.
    """

    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    max_prefetch: int = 0
    budget: int | None = None
    name: str = "static"

    def __post_init__(self) -> None:
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac"):
            _check_fraction(name, getattr(self, name))
        _check_counts(self.max_prefetch, self.budget)
        if self.offload_param_frac > self.shard_param_frac:
            raise ConfigError(
                f"offload_param_frac={self.offload_param_frac} is more than shard_param_frac={self.shard_param_frac}:"
                " weights that stay gathered can't live in the offload tier too; give a shard_param_frac of at least"
                f" {self.offload_param_frac}, such as 1.0"
            )

    def locations(self, sizes: Sequence[ChunkBytes], trace: Trace | None) -> ChunkLocations:
        """See `Placement.locations`."""
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
        """See `Placement.gather_budget`."""
        least = min_gather_bytes(sizes, locations.kept_gathered, event_at(trace, now))
        wanted = least + self.max_prefetch * largest_gathered(sizes, locations.kept_gathered)
        if self.budget is None:
            return wanted
        resident = resident_bytes(sizes, locations)
        other = other_bytes_at(trace, now)
        check_fit(self.budget, least + other, resident=resident)
        return min(wanted, self.budget - resident - other)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstPlacement:
    """Model data take a fixed number of bytes: payloads first, then weights and gradients, then optimizer states.

    Pieces live in the compute tier as far as they fit beside `2 + max_prefetch` payloads, the rest in the offload tier.
    Activations and temporaries are not counted.

    Attributes:
        budget: Bytes of the compute tier for model data; None: enough for all of them.
        max_prefetch: Number of chunks gathered ahead of their use.

    Raises:
        ConfigError: A number that can't be.
    """

    budget: int | None = None
    max_prefetch: int = 0

    def __post_init__(self) -> None:
        _check_counts(self.max_prefetch, self.budget)

    @property
    def name(self) -> str:
        """What users call it."""
        return "const"

    def locations(self, sizes: Sequence[ChunkBytes], trace: Trace | None) -> ChunkLocations:
        """See `Placement.locations`."""
        if self.budget is None:
            return ChunkLocations()
        least = min_budget_bytes(sizes, frozenset(), trace, counts_others=False)
        check_fit(self.budget, least)
        return fit_to_budget(self.budget - least, sizes, trace, max_prefetch=self.max_prefetch)

    def gather_budget(
        self, sizes: Sequence[ChunkBytes], locations: ChunkLocations, trace: Trace | None, now: int
    ) -> int:
        """See `Placement.gather_budget`."""
        if self.budget is None:
            return all_gathered_bytes(sizes)
        resident = resident_bytes(sizes, locations)
        check_fit(
            self.budget, min_gather_bytes(sizes, locations.kept_gathered, event_at(trace, now)), resident=resident
        )
        return self.budget - resident


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPlacement:
    """Model data take what activations and temporaries leave, by the record of the first iteration.

    During that iteration they take `1 - warmup_ratio` of the budget, but at least `2 + max_prefetch` payloads, and are
    divided as `ConstPlacement` does. From then on everything together takes `steady_ratio` of the budget: pieces live
    in the compute tier as far as they fit beside the largest sum of activations, temporaries and least payloads, and
    what the event leaves free is for gathered chunks.

    Attributes:
        budget: Bytes of the compute tier for everything; None: enough for all model data.
        steady_ratio: The user's `steady_cuda_cap_ratio`.
        warmup_ratio: The user's `warmup_non_model_data_ratio`.
        gpu_margin_mem_ratio: Fraction of what weights and gradients leave that optimizer states may take; 0: all of it.
        max_prefetch: Number of chunks gathered ahead of their use.

    Raises:
        ConfigError: A number that can't be.
    """

    budget: int | None = None
    steady_ratio: float = 0.9
    warmup_ratio: float = 0.8
    gpu_margin_mem_ratio: float = 0.0
    max_prefetch: int = 0

    def __post_init__(self) -> None:
        _check_fraction("steady_cuda_cap_ratio", self.steady_ratio)
        _check_fraction("warmup_non_model_data_ratio", self.warmup_ratio)
        _check_fraction("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio)
        _check_counts(self.max_prefetch, self.budget)
        if self.steady_ratio == 0:
            raise ConfigError(
                "steady_cuda_cap_ratio=0 leaves no memory to train in: give a number up to 1, such as 0.9"
            )

    @property
    def name(self) -> str:
        """What users call it."""
        return "auto"

    def locations(self, sizes: Sequence[ChunkBytes], trace: Trace | None) -> ChunkLocations:
        """See `Placement.locations`."""
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
        """See `Placement.gather_budget`."""
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
        """Return what model data may take while nothing is known of the rest."""
        assert self.budget is not None
        least = min_gather_bytes(sizes, frozenset(), None)
        check_fit(self.budget, least)
        wanted = least + self.max_prefetch * largest_gathered(sizes, frozenset())
        return min(self.budget, max(wanted, self.budget - share_of(self.budget, self.warmup_ratio)))


def make_placement(
    policy_name: str,
    *,
    shard_param_frac: float = 1.0,
    offload_optim_frac: float = 0.0,
    offload_param_frac: float = 0.0,
    warmup_non_model_data_ratio: float = 0.8,
    steady_cuda_cap_ratio: float = 0.9,
    gpu_margin_mem_ratio: float = 0.0,
    max_prefetch: int = 0,
    budget: int | None = None,
) -> Placement:
    """Return the policy that a plugin's arguments ask for.

    Args:
        policy_name: "static" (fixed fractions), "cuda" and "cpu" (its ends: nothing or everything is offloaded),
            "const" (fixed bytes for model data) or "auto" (what activations leave).
        shard_param_frac: Of "static".
        offload_optim_frac: Of "static".
        offload_param_frac: Of "static".
        warmup_non_model_data_ratio: Of "auto".
        steady_cuda_cap_ratio: Of "auto".
        gpu_margin_mem_ratio: Of "auto".
        max_prefetch: Number of chunks gathered ahead of their use.
        budget: Bytes of the compute tier; None: enough.

    Raises:
        ConfigError: A policy that is not known, a number that can't be, or one that the policy would not look at.
    """
    if policy_name not in ("static", "cuda", "cpu", "const", "auto"):
        raise ConfigError(
            f"placement_policy={policy_name!r} is not known: choose one of 'static', 'cuda', 'cpu', 'const', 'auto'"
        )
    fractions = (shard_param_frac, offload_optim_frac, offload_param_frac)
    ratios = (warmup_non_model_data_ratio, steady_cuda_cap_ratio, gpu_margin_mem_ratio)
    if policy_name != "static":
        _refuse_unused("static", policy_name, _FRACTIONS, fractions)
    if policy_name != "auto":
        _refuse_unused("auto", policy_name, _RATIOS, ratios)
    if policy_name == "auto":
        return AutoPlacement(
            budget=budget,
            steady_ratio=steady_cuda_cap_ratio,
            warmup_ratio=warmup_non_model_data_ratio,
            gpu_margin_mem_ratio=gpu_margin_mem_ratio,
            max_prefetch=max_prefetch,
        )
    if policy_name == "const":
        return ConstPlacement(budget=budget, max_prefetch=max_prefetch)
    is_cpu = policy_name == "cpu"
    return StaticPlacement(
        shard_param_frac=shard_param_frac,
        offload_optim_frac=1.0 if is_cpu else offload_optim_frac,
        offload_param_frac=1.0 if is_cpu else offload_param_frac,
        max_prefetch=max_prefetch,
        budget=budget,
        name=policy_name,
    )


def evictions(candidates: Mapping[int, int], next_use: Callable[[int], int | None], bytes_needed: int) -> list[int]:
    """Return the gathered chunks to evict, in order.

    The one whose next use is farthest goes first (L. A. Belady, A study of replacement algorithms for a virtual-storage
    computer, 1966), before all others one that is never used again. With chunks of one size nothing gathers fewer.

    Args:
        candidates: Number and bytes of each chunk that may go.
        next_use: Returns the moment of a chunk's next use, or None if there is none.
        bytes_needed: Number of bytes to free.

    Returns:
        As few of that order as free `bytes_needed`; all of them if that is not enough.
    """

    def soonest_last(chunk: int) -> tuple[float, int]:
        use = next_use(chunk)
        return (-math.inf if use is None else -use, chunk)

    chosen: list[int] = []
    if bytes_needed > 0:
        for chunk in sorted(candidates, key=soonest_last):
            chosen.append(chunk)
            bytes_needed -= candidates[chunk]
            if bytes_needed <= 0:
                break
    return chosen


def _check_fraction(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{name}={value!r} is not a fraction: give a number from 0 to 1")


def _check_counts(max_prefetch: Any, budget: Any) -> None:
    if not isinstance(max_prefetch, int) or isinstance(max_prefetch, bool) or max_prefetch < 0:
        raise ConfigError(
            f"max_prefetch={max_prefetch!r} is not a number of chunks: give a whole number, such as 1, or 0 for none"
        )
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget <= 0):
        raise ConfigError(
            f"device_memory_budget={budget!r} is not a number of bytes: give a whole number above 0, such as"
            " 8 * 2**30, or None"
        )


def _refuse_unused(owner: str, policy_name: str, defaults: Mapping[str, float], given: Sequence[Any]) -> None:
    """Refuse values other than the default of what only another policy looks at."""
    for (name, default), value in zip(defaults.items(), given, strict=True):
        if value != default:
            raise ConfigError(
                f"{name}={value!r} is for placement_policy={owner!r}, and {policy_name!r} would not look at it: leave"
                f" it out, or choose {owner!r}"
            )
