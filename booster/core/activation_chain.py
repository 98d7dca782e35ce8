"""Optimal activation checkpointing of a chain of stages: which activations are kept, and what is recomputed from where.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory", 2019 (Inria RR-9302).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# Note [Persistent schedules]
# A schedule is a sequence of items, in the order of forward. A stage that is an item by itself keeps its input and what
# its forward saves. A segment of stages keeps the input of its first stage only; backward repeats it under a schedule
# of its own, the items inside of it, once all stages behind it are done. "Persistent": what is kept stays until its
# backward. The best persistent schedule of stages s to t within m bytes is the better one of two:
# - s is kept: forward and backward of s, and the best schedule of s+1 to t in what s leaves of m;
# - s to j-1 are a segment: their forward, the best schedule of j to t in what the input of s leaves of m, and then the
#   best schedule of s to j-1 in m.
# With L stages and S sizes of memory that takes O(L^3 S) steps; S at a time are one operation on arrays.
Item: TypeAlias = "int | tuple[Item, ...]"
Items: TypeAlias = tuple[Item, ...]

_MAX_RESOLUTION, _MIN_RESOLUTION = 4096, 512  # sizes of memory, unless fewer suffice to be exact
_MAX_WORK = 4_000_000  # of sizes times the square of stages
_MAX_EXACT = 2048
_NUM_RECOMPUTATION_SIZES = 24  # sizes tried for the largest recomputation, if several forwards wait for their backward


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """Costs of a stage of a chain, in bytes and in any unit of time.

    Attributes:
        input_bytes: Its input, the output of the stage before it.
        kept_bytes: What its forward saves for backward besides its input.
        gradient_bytes: Gradient of its input.
        forward_bytes: Temporaries of its forward, at most, besides input, output and what it saves.
        backward_bytes: Temporaries of its backward, at most, besides those and the gradients of input and output.
        forward_time: Time of its forward.
        backward_time: Time of its backward.
        num_live: Number of its forwards that wait for their backward at once, such as microbatches of a pipeline.
        is_chained: If False, it can't be recomputed from an earlier stage, whose output is not its input, unchanged.
    """

    input_bytes: int = 0
    kept_bytes: int = 0
    gradient_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_time: float = 0.0
    backward_time: float = 0.0
    num_live: int = 1
    is_chained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages that run one after another, and backward in the reverse order.

    Attributes:
        stages: Stages, in order.
        end: What follows, such as the loss, which is always kept.
        offloads_inputs: If True, inputs of segments wait for backward in another memory.
    """

    stages: tuple[ChainStage, ...]
    end: ChainStage = field(default_factory=ChainStage)
    offloads_inputs: bool = False

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a chain has at least one stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolution:
    """Schedule of a chain and what it takes.

    Attributes:
        items: Schedule; see Note [Persistent schedules].
        num_bytes: Memory at the peak.
        time: Time of forward, backward and recomputation.
    """

    items: Items
    num_bytes: int
    time: float


def solve_chain(chain: Chain, budget_bytes: int) -> ChainSolution | None:
    """Return the persistent schedule that takes the least time within a budget, or None if none fits.

    Optimal where all sizes are multiples of a common size of which the budget has at most 2048. Otherwise sizes are
    rounded to one of 512 to 4096 parts of the budget, and the schedule is the best found that fits without rounding.

    Where several forwards wait for their backward at once, what is kept for all of them counts all the time, and the
    largest recomputation in addition.

    Args:
        chain: Stages.
        budget_bytes: Memory for inputs, what is kept, gradients and temporaries.
    """
    if budget_bytes <= 0:
        return None
    has_many = any(one.num_live > 1 for one in chain.stages)
    found = _solve_pipeline(chain, budget_bytes) if has_many else _solve_single(chain, budget_bytes)
    best: ChainSolution | None = None
    for items in found:
        solution = ChainSolution(
            items=items, num_bytes=schedule_bytes(chain, items), time=schedule_time(chain.stages, items)
        )
        if solution.num_bytes <= budget_bytes and (best is None or solution.time < best.time):
            best = solution
    return best


def smallest_schedule(chain: Chain) -> ChainSolution:
    """Return the schedule that needs the least memory of those found."""
    items: Items = tuple((index,) for index in range(len(chain.stages)))
    upper = schedule_bytes(chain, items)
    if all(one.num_live == 1 for one in chain.stages):
        tables = _Tables(chain, _with_margin(chain, upper))
        times = tables.times[0][len(chain.stages)]
        found = tables.items(0, len(chain.stages), int(np.argmax(np.isfinite(times))))[:-1]
        items = min(items, found, key=lambda one: schedule_bytes(chain, one))
    return ChainSolution(items=items, num_bytes=schedule_bytes(chain, items), time=schedule_time(chain.stages, items))


def stages_of(items: Items) -> tuple[int, ...]:
    """Return the stages of a schedule, in order."""
    return tuple(stage for item in items for stage in ((item,) if isinstance(item, int) else stages_of(item)))


def restricted(items: Items, start: int, end: int) -> Items:
    """Return a schedule without the stages before `start` and from `end` on, counted from `start`."""
    moved = (item - start if isinstance(item, int) else restricted(item, start, end) for item in items)
    return tuple(one for one in moved if (0 <= one < end - start if isinstance(one, int) else one))


def schedule_time(stages: Sequence[ChainStage], items: Items) -> float:
    """Return the time of a schedule: each forward as often as it runs, each backward once."""

    def forwards(items: Items) -> float:
        return sum(
            stages[item].forward_time
            if isinstance(item, int)
            else sum(stages[one].forward_time for one in stages_of(item)) + forwards(item)
            for item in items
        )

    return forwards(items) + sum(stages[one].backward_time for one in stages_of(items))


def schedule_bytes(chain: Chain, items: Items) -> int:
    """Return the memory that a schedule needs at its peak; see `solve_chain`."""
    sizes = (*chain.stages, chain.end)
    whole = (*items, len(chain.stages))
    if all(one.num_live == 1 for one in chain.stages):
        return max(_run(sizes, whole, 0, chain.offloads_inputs))
    base = sum(_held(sizes, item, chain.offloads_inputs) * _live(sizes, item) for item in whole)
    return base + max(
        max(_run(sizes, (item,), 0, chain.offloads_inputs)) - _held(sizes, item, chain.offloads_inputs)
        for item in whole
    )


def _held(stages: Sequence[ChainStage], item: Item, offloads_inputs: bool) -> int:
    """Return what an item keeps until its backward."""
    if isinstance(item, int):
        return stages[item].input_bytes + stages[item].kept_bytes
    return 0 if offloads_inputs else stages[stages_of(item)[0]].input_bytes


def _live(stages: Sequence[ChainStage], item: Item) -> int:
    return stages[item if isinstance(item, int) else stages_of(item)[0]].num_live


def _run(stages: Sequence[ChainStage], items: Items, held: int, offloads_inputs: bool = False) -> Iterator[int]:
    """Yield the memory at each point of a forward and backward of items that may be a peak, beside `held` bytes."""
    gradient = _after(stages, stages_of(items)[-1]).gradient_bytes
    for number, item in enumerate(items):
        if isinstance(item, int):
            is_last = number == len(items) - 1
            yield held + gradient + _forward_kept(stages, item, is_last)
        else:
            for stage in stages_of(item):
                yield held + gradient + _forward_dropped(stages, stages_of(item)[0], stage)
        held += _held(stages, item, offloads_inputs)
    for item in reversed(items):
        held -= _held(stages, item, offloads_inputs)
        if isinstance(item, int):
            yield held + _backward(stages, item)
        else:
            yield from _run(stages, item, held)


def _after(stages: Sequence[ChainStage], stage: int) -> ChainStage:
    return stages[stage + 1] if stage + 1 < len(stages) else ChainStage()


def _forward_kept(stages: Sequence[ChainStage], stage: int, is_last: bool) -> int:
    # A recomputation ends with the last tensor that is saved, before the output.
    one, output = stages[stage], 0 if is_last else _after(stages, stage).input_bytes
    return one.input_bytes + one.kept_bytes + output + one.forward_bytes


def _forward_dropped(stages: Sequence[ChainStage], first: int, stage: int) -> int:
    one, own = stages[stage], 0 if stage == first else stages[stage].input_bytes
    return stages[first].input_bytes + own + _after(stages, stage).input_bytes + one.forward_bytes


def _backward(stages: Sequence[ChainStage], stage: int) -> int:
    one, gradient = stages[stage], _after(stages, stage).gradient_bytes
    return one.input_bytes + one.kept_bytes + gradient + one.gradient_bytes + one.backward_bytes


def _slot_bytes(chain: Chain, budget_bytes: int) -> tuple[int, bool]:
    """Return the unit that sizes are rounded up to, and whether all are multiples of it."""
    sizes = [
        size
        for one in (*chain.stages, chain.end)
        for size in (one.input_bytes, one.kept_bytes, one.gradient_bytes, one.forward_bytes, one.backward_bytes)
    ]
    divisor = math.gcd(*sizes)
    if divisor and budget_bytes // divisor <= _MAX_EXACT:
        return divisor, True
    unit = max(1, math.ceil(budget_bytes / _resolution(chain)))
    return unit, unit == 1


def _resolution(chain: Chain) -> int:
    return min(_MAX_RESOLUTION, max(_MIN_RESOLUTION, _MAX_WORK // len(chain.stages) ** 2))


class _Tables:
    """Least times of all parts of a chain in every size of memory; see Note [Persistent schedules].

    Args:
        chain: Stages.
        capacity: Largest size.

    Attributes:
        slot: Unit of the sizes.
        times: Least time of stages s to t, inclusive, by s, t and number of units. The stage behind the last is the
            end of the chain. What ends with it is the schedule of a first forward, everything else a recomputation.
    """

    def __init__(self, chain: Chain, capacity: int) -> None:
        self._chain = chain
        self._stages = (*chain.stages, chain.end)
        self.slot, self._is_exact = _slot_bytes(chain, capacity)
        self.num_slots = capacity // self.slot
        count = len(self._stages)
        self._prefix = [0.0, *accumulate(one.forward_time for one in self._stages)]
        self.times: list[list[NDArray[np.float64]]] = [[np.empty(0)] * count for _ in range(count)]
        self._splits: list[list[NDArray[np.int16]]] = [[np.empty(0, np.int16)] * count for _ in range(count)]
        for length in range(1, count + 1):
            for first in range(count - length + 1):
                self._fill(first, first + length - 1)

    def slots(self, num_bytes: int) -> int:
        """Return the number of units of a size, rounded up."""
        return -(-num_bytes // self.slot)

    def held_slots(self, num_bytes: int) -> int:
        """Return the number of units of what is kept, rounded to the nearest: errors of many items cancel."""
        return self.slots(num_bytes) if self._is_exact else round(num_bytes / self.slot)

    def items(self, first: int, last: int, slots: int) -> Items:
        """Return the schedule of the least time of stages within a number of units, which must exist."""
        found: list[Item] = []
        while first <= last:
            split = int(self._splits[first][last][slots])
            if split == first:
                found.append(first)
                slots -= self.held_slots(_held(self._stages, first, False))
                first += 1
            else:
                found.append(self.items(first, split - 1, slots))
                slots -= self.held_slots(self._input_of_segment(first, last))
                first = split
        return tuple(found)

    def _input_of_segment(self, first: int, last: int) -> int:
        is_offloaded = self._chain.offloads_inputs and last == len(self._chain.stages)
        return 0 if is_offloaded else self._stages[first].input_bytes

    def _fill(self, first: int, last: int) -> None:
        stages, times, size = self._stages, self.times, self.num_slots + 1
        one, gradient = stages[first], _after(stages, last).gradient_bytes
        found = np.full((last - first + 1, size), np.inf)  # by the stage that the next item begins at
        held = self.held_slots(_held(stages, first, False))
        needed = max(gradient + _forward_kept(stages, first, first == last), _backward(stages, first))
        start = max(held, self.slots(needed))
        if start < size:
            rest = times[first + 1][last][start - held : size - held] if first < last else 0.0
            found[0, start:] = one.forward_time + one.backward_time + rest
        held = self.held_slots(self._input_of_segment(first, last))
        needed = 0
        for split in range(first + 1, last + 1):
            if split - 1 > first and not stages[split - 1].is_chained:
                break
            needed = max(needed, gradient + _forward_dropped(stages, first, split - 1))
            start = max(held, self.slots(needed))
            if start >= size:
                break
            forward = self._prefix[split] - self._prefix[first]
            rest = times[split][last][start - held : size - held]
            found[split - first, start:] = forward + rest + times[first][split - 1][start:]
        best = found.argmin(axis=0)
        times[first][last] = np.take_along_axis(found, best[None], axis=0)[0]
        self._splits[first][last] = (first + best).astype(np.int16)


def _solve_single(chain: Chain, budget_bytes: int) -> Iterator[Items]:
    """Yield schedules, from the fastest, until one fits the budget without rounding.

    Of equal ones first that for the budget, which has the smaller segments, then that for the least memory.
    """
    last = len(chain.stages)
    tables = _Tables(chain, _with_margin(chain, budget_bytes))
    times = tables.times[0][last]
    for time in np.unique(times[np.isfinite(times)]):
        sizes = np.flatnonzero(times == time)
        for size in (min(int(sizes[-1]), max(int(sizes[0]), budget_bytes // tables.slot)), int(sizes[0])):
            items = tables.items(0, last, size)[:-1]
            yield items
            if schedule_bytes(chain, items) <= budget_bytes:
                return
    yield tuple((index,) for index in range(last))


def _with_margin(chain: Chain, budget_bytes: int) -> int:
    """Return a budget plus what rounding may add."""
    _, is_exact = _slot_bytes(chain, budget_bytes)
    return budget_bytes if is_exact else budget_bytes + budget_bytes * (len(chain.stages) + 2) // _resolution(chain)


def _solve_pipeline(chain: Chain, budget_bytes: int) -> Iterator[Items]:
    """Yield the best schedule for each of several sizes of the largest recomputation."""
    tables = _Tables(chain, budget_bytes)
    stages = (*chain.stages, chain.end)
    items: list[Item] = [(index,) for index in range(len(chain.stages))]
    single = {max(_run(stages, (item,), 0)) - _held(stages, item, chain.offloads_inputs) for item in items}
    for largest in sorted({*single, *map(int, np.linspace(0, budget_bytes, _NUM_RECOMPUTATION_SIZES))}):
        found = _solve_within(chain, tables, budget_bytes - largest, largest)
        if found is not None:
            yield found


def _solve_within(chain: Chain, tables: _Tables, budget_bytes: int, largest: int) -> Items | None:
    """Return the schedule of the least time that keeps at most `budget_bytes` in all; None if there is none.

    Args:
        chain: Stages.
        tables: Its tables, for recomputations.
        budget_bytes: Memory for what items keep.
        largest: Memory for what an item needs in addition while it runs.
    """
    stages, count = (*chain.stages, chain.end), len(chain.stages)
    capacity = (budget_bytes - _held(stages, count, False)) // tables.slot
    if capacity < 0 or max(_run(stages, (count,), 0)) - _held(stages, count, False) > largest:
        return None
    best: list[NDArray[np.float64]] = [np.zeros(capacity + 1)] * (count + 1)
    chosen: list[tuple[list[_Option], NDArray[np.intp]]] = [([], np.empty(0, np.intp))] * count
    for first in reversed(range(count)):
        options = [one for one in _options(chain, tables, first, largest) if one.slots <= capacity]
        found = np.full((len(options) + 1, capacity + 1), np.inf)
        for number, one in enumerate(options):
            found[number, one.slots :] = one.time + best[one.end][: capacity + 1 - one.slots]
        choice = found.argmin(axis=0)
        best[first], chosen[first] = np.take_along_axis(found, choice[None], axis=0)[0], (options, choice)
    if not math.isfinite(best[0][capacity]):
        return None
    items: list[Item] = []
    first, left = 0, capacity
    while first < count:
        options, choice = chosen[first]
        option = options[choice[left]]
        items.append(first if option.is_kept else tables.items(first, option.end - 1, option.recomputation_slots))
        first, left = option.end, left - option.slots
    return tuple(items)


@dataclass(frozen=True, slots=True)
class _Option:
    """An item that begins at a stage: what the next one begins at, what it keeps, its time, and its recomputation."""

    end: int
    slots: int
    time: float
    is_kept: bool
    recomputation_slots: int = 0


def _options(chain: Chain, tables: _Tables, first: int, largest: int) -> Iterator[_Option]:
    stages = (*chain.stages, chain.end)
    one, held = stages[first], _held(stages, first, False)
    if max(_run(stages, (first,), 0)) - held <= largest:
        yield _Option(first + 1, tables.held_slots(held * one.num_live), one.forward_time + one.backward_time, True)
    held = _held(stages, (first,), chain.offloads_inputs)
    slots = min((largest + held) // tables.slot, tables.num_slots)
    forward = 0.0
    for end in range(first + 1, len(stages)):
        is_chained = end - 1 == first or stages[end - 1].is_chained
        if not is_chained or _forward_dropped(stages, first, end - 1) - held > largest:
            return
        forward += stages[end - 1].forward_time
        again = float(tables.times[first][end - 1][slots])
        if math.isfinite(again):
            yield _Option(end, tables.held_slots(held * one.num_live), forward + again, False, slots)
