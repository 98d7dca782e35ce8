"""Which gathered chunk goes: simulated memories, compared with the longest unused and with every choice there is."""

from __future__ import annotations

import random
from functools import cache

import pytest

from booster.plugins.gemini.placement import Trace, TraceEvent, evictions


def test_the_chunk_goes_whose_next_use_is_farthest():
    uses = {0: 5, 1: None, 2: 9, 3: 5, 4: None}
    equal = dict.fromkeys(uses, 10)
    order = [1, 4, 2, 0, 3]
    for count in range(6):
        assert evictions(equal, uses.get, 10 * count) == order[:count]
    assert evictions(equal, uses.get, 11) == order[:2]
    assert evictions(equal, uses.get, -1) == []
    assert evictions(equal, uses.get, 999) == order
    assert evictions({}, uses.get, 1) == []
    assert evictions({0: 50, 2: 10, 3: 1}, uses.get, 11) == [2, 0]


def moment(chunk):
    return TraceEvent(chunks=(chunk,), is_backward=False, other_bytes=0)


def loads(trace, capacity, victim):
    """Simulates a memory of `capacity` equal chunks. `victim(loaded, now)` names who goes; returns the loads."""
    loaded, count = [], 0
    for now, chunk in enumerate(trace):
        if chunk in loaded:
            loaded.remove(chunk)  # and back at the end: the order is that of their last use
        else:
            count += 1
            if len(loaded) == capacity:
                loaded.remove(victim(loaded, now))
        loaded.append(chunk)
    return count


def farthest_in(record, trace):
    """The farthest by a record whose iterations the trace repeats."""
    num_moments = len(record.events)

    def victim(loaded, now):
        (chosen,) = evictions(
            dict.fromkeys(loaded, 8), lambda chunk: record.next_use(chunk, now % num_moments + 1), bytes_needed=8
        )
        return chosen

    assert len(trace) % num_moments == 0
    return victim


def farthest(trace):
    def victim(loaded, now):
        def next_use(chunk):
            return next((at for at in range(now, len(trace)) if trace[at] == chunk), None)

        (chosen,) = evictions(dict.fromkeys(loaded, 8), next_use, bytes_needed=8)
        return chosen

    return victim


def longest_unused(loaded, now):
    return loaded[0]


def fewest_loads(trace, capacity):
    """Tries every choice of who goes."""

    @cache
    def fewest(loaded, now):
        if now == len(trace):
            return 0
        chunk = trace[now]
        if chunk in loaded:
            return fewest(loaded, now + 1)
        if len(loaded) < capacity:
            return 1 + fewest(loaded | {chunk}, now + 1)
        return 1 + min(fewest((loaded - {victim}) | {chunk}, now + 1) for victim in loaded)

    return fewest(frozenset(), 0)


@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 400))]
)
def test_the_farthest_is_never_worse_than_the_longest_unused(seed):
    generator = random.Random(seed)
    num_chunks = generator.randrange(2, 20)
    trace = [generator.randrange(num_chunks) for _ in range(generator.randrange(1, 150))]
    capacity = generator.randrange(1, 8)
    assert loads(trace, capacity, farthest(trace)) <= loads(trace, capacity, longest_unused)


@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 400))]
)
def test_nothing_loads_fewer_than_the_farthest(seed):
    generator = random.Random(seed)
    num_chunks, capacity = generator.randrange(2, 6), generator.choice([2, 3])
    trace = [generator.randrange(num_chunks) for _ in range(generator.randrange(1, 10))]
    best = fewest_loads(trace, capacity)
    assert loads(trace, capacity, farthest(trace)) == best
    # The same holds from iteration to iteration, by what a record tells.
    record = Trace(tuple(map(moment, trace)))
    again = trace * 3
    assert loads(again, capacity, farthest_in(record, again)) == fewest_loads(again, capacity)


def test_the_longest_unused_is_the_worst_for_an_iteration_that_comes_back():
    forward = list(range(8))
    trace = forward * 10
    assert loads(trace, 7, longest_unused) == 80
    assert loads(trace, 7, farthest(trace)) == fewest_loads(tuple(trace), 7) == 18
