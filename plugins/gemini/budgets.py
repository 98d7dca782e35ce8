"""What chunks take of a memory budget, and what fits into it: numbers only, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

from booster.errors import ConfigError
from booster.plugins.gemini.tracer import Trace, TraceEvent

__all__ = [
    "ChunkBytes",
    "ChunkLocations",
    "all_gathered_bytes",
    "check_fit",
    "event_at",
    "fit_to_budget",
    "largest_gathered",
    "last_of",
    "min_budget_bytes",
    "min_gather_bytes",
    "other_bytes_at",
    "resident_bytes",
    "resident_shard_bytes",
    "share_of",
]

# Note [Which chunks are offloaded]
# All policies offload those chunks first that forward uses last, whole chunks from the end. Forward begins with the
# weights of the first chunks, right after the step: nothing could hide their way back from the offload tier, while the
# last ones have the whole forward for it. Backward goes the other way round: the gradients of the last chunks are
# complete first and have the rest of backward for their way out. For the same reason the chunks that stay gathered are
# the first ones. Before the first iteration chunks are taken to be used in the order of their numbers.

# Note [Least room]
# To compute at all a rank needs the weights of a module's chunks and a buffer for the gradients of each of them that
# trains. No policy gives less than that, and never less than the weights of one chunk and one gradient buffer, of the
# largest: an iteration that deviates from its record may need any chunk at any moment. Where a budget is too small for
# `max_prefetch` more payloads, fewer are prefetched. Where it is too small for the least, ConfigError is raised.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Bytes of a chunk on this rank.

    Attributes:
        payload: All of its weights, gathered; a gradient buffer takes as much.
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
        kept: Chunks that stay gathered all the time; none of `weights`.
    """

    weights: frozenset[int] = frozenset()
    states: frozenset[int] = frozenset()
    kept_gathered: frozenset[int] = frozenset()


def resident_shard_bytes(sizes: Sequence[ChunkBytes], locations: ChunkLocations) -> int:
    """Returns how many bytes of pieces live in the compute tier."""
    weights = sum(size.weights + size.gradients for chunk, size in enumerate(sizes) if chunk not in locations.weights)
    return weights + sum(size.states for chunk, size in enumerate(sizes) if chunk not in locations.states)


def resident_bytes(sizes: Sequence[ChunkBytes], locations: ChunkLocations) -> int:
    """Returns the bytes of model data that are in the compute tier at every moment: pieces and kept chunks."""
    return resident_shard_bytes(sizes, locations) + sum(sizes[chunk].gathered for chunk in locations.kept_gathered)


def all_gathered_bytes(sizes: Sequence[ChunkBytes]) -> int:
    """Returns the bytes of all weights and all gradient buffers."""
    return sum(size.gathered * (2 if size.trains else 1) for size in sizes)


def largest_gathered(sizes: Sequence[ChunkBytes], kept: Set[int]) -> int:
    """Returns the bytes of the largest payload among the chunks that don't stay gathered, 0 if there are none."""
    return max((size.gathered for chunk, size in enumerate(sizes) if chunk not in kept), default=0)


def min_gather_bytes(sizes: Sequence[ChunkBytes], kept: Set[int], event: TraceEvent | None) -> int:
    """Returns the bytes of payloads without which a rank can't compute: see Note [Least room].

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
    """Returns the most that the least payloads take at any moment, with everything else that is no model data.

    Args:
        sizes: Of each chunk, by number.
        kept: Chunks that stay gathered.
        trace: Of an iteration; None: nothing is known of it.
        counts_others: Activations and temporaries count.
    """
    most = min_gather_bytes(sizes, kept, None)
    for now, event in enumerate(trace.events if trace is not None else ()):
        others = other_bytes_at(trace, now) if counts_others else 0
        most = max(most, min_gather_bytes(sizes, kept, event) + others)
    return most


def event_at(trace: Trace | None, now: int) -> TraceEvent | None:
    """Returns a moment, or None where the record has none."""
    return trace.events[now] if trace is not None and now < len(trace.events) else None


def other_bytes_at(trace: Trace | None, now: int) -> int:
    """Returns what activations and temporaries take at a moment and the next: room must not be taken back between."""
    return 0 if trace is None else trace.peak_other_bytes(now, now + 2)


def last_of(chunks: Iterable[int], sizes: Sequence[ChunkBytes], fraction: float) -> frozenset[int]:
    """Returns the last chunks whose payloads are together at least a fraction of those of all the given ones.

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
    """Returns homes whose pieces fit: room is left for prefetched payloads, then come weights, gradients and states.

    Args:
        num_bytes: What is free of the compute tier beside the least payloads and everything else.
        sizes: Of each chunk, by number.
        trace: Of an iteration, for the order of use; None: the order of the numbers.
        max_prefetch: For how many more payloads room is left, as far as they fit at all.
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
    """Returns a fraction of bytes, rounded down; the ratio is taken as it is written, 0.9 as nine tenths."""
    return int(num_bytes * _exactly(ratio))


def check_fit(budget: int, needed: int, *, resident: int = 0, ratio: float = 1.0) -> None:
    """Refuses a budget that is too small.

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
    """Returns the numbers of all chunks, those that are never used at the end."""
    if trace is None:
        return list(range(len(sizes)))

    def first_use(chunk: int) -> float:
        use = trace.next_use(chunk, 0)
        return math.inf if use is None else use

    return sorted(range(len(sizes)), key=first_use)


def _beyond(num_bytes: int, chunks: Sequence[int], bytes_of: Sequence[int]) -> frozenset[int]:
    """Returns the chunks from the first one on that does not fit any more."""
    for index, shard_bytes in enumerate(bytes_of):
        num_bytes -= shard_bytes
        if num_bytes < 0:
            return frozenset(chunks[index:])
    return frozenset()
