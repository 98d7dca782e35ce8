"""Optimal schedules of chains against all persistent schedules, whose memory and time are simulated here."""

from __future__ import annotations

import random
import time
from functools import cache

import pytest

from booster.core.activation_chain import (
    Chain,
    ChainStage,
    schedule_bytes,
    schedule_time,
    smallest_schedule,
    solve_chain,
)


@cache
def schedules(first, last):
    """Return all schedules of the stages from `first` to before `last`, whose recomputations end with a kept stage."""
    if first == last:
        return [()]
    found = [(first, *rest) for rest in schedules(first + 1, last)]
    for end in range(first + 1, last + 1):
        inner = [(*one, end - 1) for one in schedules(first, end - 1)]
        found += [(segment, *rest) for segment in inner for rest in schedules(end, last)]
    return found


class Simulation:
    """Step of a chain that allocates and frees by name."""

    def __init__(self, stages, offloads):
        self.stages, self.offloads = stages, offloads
        self.live, self.now, self.peak, self.time = {}, 0, 0, 0

    def set(self, name, size):
        self.now += size - self.live.get(name, 0)
        self.live[name] = size
        self.peak = max(self.peak, self.now)

    def free(self, *names):
        for name in names:
            self.now -= self.live.pop(name, 0)

    def size(self, stage, field):
        return getattr(self.stages[stage], field) if stage < len(self.stages) else 0

    def forward(self, stage, keeps, has_output=True):
        self.time += self.stages[stage].forward_time
        if keeps:
            self.set(("kept", stage), self.stages[stage].kept_bytes)
        if has_output:
            self.set(("input", stage + 1), self.size(stage + 1, "input_bytes"))
        self.set("temporaries", self.stages[stage].forward_bytes)
        self.free("temporaries")

    def run(self, items, is_first):
        """Forward of items, then their backward, which ends with the gradient of their first input."""
        starts = []
        for number, item in enumerate(items):
            if isinstance(item, int):
                starts.append(item)
                self.forward(item, True, is_first or number < len(items) - 1)
                continue
            stages = flat(item)
            starts.append(stages[0])
            for stage in stages:
                self.forward(stage, False)
                if stage != stages[0]:
                    self.free(("input", stage))
            if is_first and self.offloads:
                self.free(("input", stages[0]))
        for start, item in reversed(list(zip(starts, items, strict=True))):
            end = start if isinstance(item, int) else flat(item)[-1]
            self.free(("input", end + 1))
            if isinstance(item, int):
                self.time += self.stages[item].backward_time
                self.set(("gradient", item), self.stages[item].gradient_bytes)
                self.set(("gradient", item + 1), self.size(item + 1, "gradient_bytes"))
                self.set("temporaries", self.stages[item].backward_bytes)
                self.free("temporaries", ("kept", item), ("gradient", item + 1))
            else:
                self.set(("gradient", end + 1), self.size(end + 1, "gradient_bytes"))
                self.set(("input", start), self.stages[start].input_bytes)
                self.run(item, False)


def flat(item):
    return [item] if isinstance(item, int) else [stage for one in item for stage in flat(one)]


def simulate(stages, items, offloads=False):
    simulation = Simulation(stages, offloads)
    simulation.set(("input", 0), stages[0].input_bytes)
    simulation.run(items, True)
    assert simulation.now == simulation.live[("gradient", 0)] + simulation.live[("input", 0)], "something is not freed"
    return simulation.peak, simulation.time


def is_possible(item, stages):
    if isinstance(item, int):
        return True
    return all(stages[one].is_chained for one in flat(item)[1:]) and all(is_possible(one, stages) for one in item)


def random_stages(generator, count, *, chained=True):
    return [
        ChainStage(
            input_bytes=generator.randint(1, 4),
            kept_bytes=generator.randint(0, 9),
            gradient_bytes=generator.choice([0, 2, 3]),
            forward_bytes=generator.choice([0, 0, 2]),
            backward_bytes=generator.choice([0, 0, 3]),
            forward_time=generator.randint(1, 20),
            backward_time=generator.randint(1, 40),
            is_chained=chained or generator.random() < 0.6,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize(("seed", "count"), list(enumerate(range(1, 8))))
def test_no_schedule_that_fits_takes_less_time(seed, count, chained, offloads):
    generator = random.Random(seed)
    stages = random_stages(generator, count, chained=chained)
    end = random_stages(generator, 1)[0]
    chain = Chain(stages=tuple(stages), end=end, offloads_inputs=offloads)
    check_against_all(chain)


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 9, 10])
def test_longer_chains(count):
    generator = random.Random(count)
    check_against_all(Chain(stages=tuple(random_stages(generator, count)), end=random_stages(generator, 1)[0]))


def check_against_all(chain):
    stages, count = [*chain.stages, chain.end], len(chain.stages)
    found = [
        (simulate(stages, (*items, count), chain.offloads_inputs), items)
        for items in schedules(0, count)
        if all(is_possible(one, stages) for one in items)
    ]
    least_time = {}
    for (peak, seconds), items in found:
        least_time[peak] = min(seconds, least_time.get(peak, seconds))
        assert schedule_time(stages, (*items, count)) == seconds
    smallest = min(least_time)
    assert solve_chain(chain, smallest - 1) is None
    assert smallest == smallest_schedule(chain).num_bytes
    for budget in range(smallest, max(least_time) + 2):
        solution = solve_chain(chain, budget)
        assert solution.num_bytes <= budget
        assert simulate(stages, (*solution.items, count), chain.offloads_inputs)[0] == solution.num_bytes
        expected = min(seconds for peak, seconds in least_time.items() if peak <= budget)
        assert solution.time + chain.end.forward_time + chain.end.backward_time == expected


def pipeline_bytes(chain, items):
    """Return what is kept for all forwards that wait, and the largest part of the rest that an item needs."""
    stages, kept, most = [*chain.stages, chain.end], 0, 0
    for item in (*items, len(chain.stages)):
        first = flat(item)[0]
        held = stages[first].input_bytes
        if isinstance(item, int):
            held += stages[item].kept_bytes
        elif chain.offloads_inputs:
            held = 0
        kept += held * stages[first].num_live
        part = stages[first : flat(item)[-1] + 1]
        after = [*stages, ChainStage()][flat(item)[-1] + 1]
        items_of_part = shifted((item,), first)
        most = max(most, simulate_part(part, items_of_part, after) - held)
    return kept + most


def shifted(items, by):
    return tuple(one - by if isinstance(one, int) else shifted(one, by) for one in items)


def simulate_part(stages, items, after):
    """Return the peak of an item that has the gradient of its output already, and drops its output at once."""
    simulation = Simulation([*stages, after], False)
    simulation.set(("gradient", len(stages)), after.gradient_bytes)
    simulation.set(("input", 0), stages[0].input_bytes)
    simulation.run(items, isinstance(items[0], tuple))
    return simulation.peak


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_several_forwards_wait_for_their_backward(seed, offloads):
    generator = random.Random(seed)
    stages = tuple(
        ChainStage(
            input_bytes=generator.choice([1, 2]),
            kept_bytes=generator.randint(3, 9),
            forward_time=generator.randint(1, 50),
            num_live=2 if index == seed else generator.choice([1, 2]),
            is_chained=False,
        )
        for index in range(5)
    )
    chain = Chain(stages=stages, offloads_inputs=offloads)
    found = [
        (pipeline_bytes(chain, items), schedule_time(stages, items))
        for items in schedules(0, len(stages))
        if all(is_possible(one, stages) for one in items)
    ]
    sizes = [size for size, _ in found]
    assert solve_chain(chain, min(sizes) - 1) is None
    for budget in range(min(sizes), max(sizes) + 2, 3):
        solution = solve_chain(chain, budget)
        assert solution.num_bytes == pipeline_bytes(chain, solution.items) <= budget
        assert solution.time == min(seconds for size, seconds in found if size <= budget)


def test_eighty_equal_layers():
    layer = ChainStage(input_bytes=2**20, kept_bytes=2**28 + 12345, forward_time=1.0)
    chain = Chain(stages=(layer,) * 80)
    budget = 80 * 2**20 + 31 * (2**28 + 12345)
    started = time.monotonic()
    solution = solve_chain(chain, budget)
    assert time.monotonic() - started < 20
    assert solution.time == 80 + 49  # the last 31 are kept, and are gone when one of the others is recomputed
    assert solve_chain(chain, 100 * 2**28).items == tuple(range(80))
    small = 2**28 + 12345 + 40 * 2**20  # the inputs of all layers do not fit
    few = solve_chain(chain, small)
    assert few.num_bytes <= small
    assert any(isinstance(item, tuple) and len(item) > 1 for item in few.items)
    assert schedule_bytes(chain, few.items) == few.num_bytes
