"""Layout conversion: the fastest sequence, against exhaustive searches, and what it refuses."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from machine_profiles import profile_of
from torch.distributed.tensor import Partial, Replicate, Shard

from booster import ConfigError
from booster.auto_parallel.placements import find_conversion
from booster.auto_parallel.placements.layout_conversion import AxisSpeed, one_step_conversions, search
from booster.estimate.machine_profile import CollectiveSpeed, Curve

SHAPE = (8, 4, 12)


def random_axes(sizes, seed):
    draw = random.Random(seed)
    names = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
    return tuple(
        AxisSpeed(
            size,
            tuple(
                CollectiveSpeed(
                    operation=name,
                    num_ranks=size,
                    num_hosts=1,
                    transport="test",
                    latency=draw.uniform(1e-6, 1e-4),
                    seconds_per_byte=draw.uniform(1e-9, 1e-6),
                )
                for name in names
            ),
            Curve(((1e3, draw.uniform(1e-7, 1e-5)),)),
        )
        for size in sizes
    )


def layouts(num_axes, num_dims, *, partial=True):
    one = [Replicate(), *(Shard(dim) for dim in range(num_dims)), *([Partial()] if partial else [])]
    return list(itertools.product(one, repeat=num_axes))


def fewest_steps(source, target, axes):
    """Breadth-first search over layouts."""
    queue, seen = deque([(source, 0)]), {source}
    while queue:
        layout, depth = queue.popleft()
        if layout == target:
            return depth
        for step in one_step_conversions(SHAPE, 4, axes, layout):
            if step.placements not in seen:
                seen.add(step.placements)
                queue.append((step.placements, depth + 1))
    return None


def cheapest_of_all(source, axes):
    """Times to all layouts: Bellman-Ford, which relaxes every step of every layout until nothing changes."""
    known = dict.fromkeys(layouts(len(axes), len(SHAPE)), math.inf)
    known[source] = 0.0
    steps = {layout: list(one_step_conversions(SHAPE, 4, axes, layout)) for layout in known}
    while True:
        changed = False
        for layout, seconds in list(known.items()):
            for step in steps[layout]:
                if seconds + step.seconds < known[step.placements] - 1e-15:
                    known[step.placements] = seconds + step.seconds
                    changed = True
        if not changed:
            return known


class ConstantCurve(Curve):
    def seconds(self, amount):
        return 1.0


@pytest.mark.parametrize("sizes", [(2,), (4, 2), (2, 3, 2)])
def test_equal_costs_give_the_fewest_steps(sizes):
    collectives = AxisSpeed.of(profile_of(latency=1.0), [0, 1]).collectives
    axes = tuple(AxisSpeed(size, collectives, ConstantCurve(((1.0, 1.0),))) for size in sizes)
    pairs = list(itertools.product(layouts(len(sizes), 3), layouts(len(sizes), 3, partial=False)))
    for source, target in random.Random(0).sample(pairs, min(len(pairs), 300)):
        found = search(SHAPE, 4, axes, source, target)
        assert len(found.steps) == fewest_steps(source, target, axes), (source, target)


@pytest.mark.parametrize("sizes", [(2,), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_conversion_is_the_fastest_of_all(sizes, seed):
    axes = random_axes(sizes, seed)
    sources = random.Random(seed).sample(layouts(len(sizes), 3), min(6, 5 ** len(sizes)))
    for source in sources:
        best = cheapest_of_all(source, axes)
        for target in layouts(len(sizes), 3, partial=False):
            found = search(SHAPE, 4, axes, source, target)
            assert found.seconds == pytest.approx(best[target], rel=1e-9), (source, target)
            layout = source
            for step in found.steps:  # each is a step from the layout before it
                assert step in set(one_step_conversions(SHAPE, 4, axes, layout))
                layout = step.placements
            assert layout == target


def test_slices_come_first_and_gathers_last():
    profile = profile_of(latency=1e-6, seconds_per_byte=1e-9, bytes_per_second=1e12)
    found = find_conversion((64, 64), torch.float32, (2, 2), [Partial(), Replicate()], [Replicate(), Shard(0)], profile)
    assert [one.operation for one in found.steps] == ["slice", "all_reduce"]
    assert found.num_bytes == 64 * 32 * 4  # 2 (n - 1) / n of half the tensor
    found = find_conversion((64, 64), torch.float32, (2, 2), [Shard(0), Shard(0)], [Replicate()] * 2, profile)
    assert [(one.operation, one.axis) for one in found.steps] == [("all_gather", 1), ("all_gather", 0)]
    assert [one.num_bytes for one in found.steps] == [64 * 64, 64 * 64 * 2]


def test_a_fast_reduce_scatter_with_a_gather_takes_the_place_of_a_slow_all_reduce():
    axes = random_axes((2,), 0)
    quick = {"latency": 1e-6, "seconds_per_byte": 1e-9}
    fast = [replace(one, **quick) for one in axes[0].collectives]
    slow = replace(fast[1], latency=1.0)
    axis = AxisSpeed(2, (fast[0], slow, *fast[2:]), axes[0].copy)
    found = search(SHAPE, 4, (axis,), (Partial(),), (Replicate(),))
    assert [one.operation for one in found.steps] == ["reduce_scatter", "all_gather"]


def test_equal_layouts_need_no_step():
    found = find_conversion(SHAPE, torch.float32, (2,), [Shard(-1)], [Shard(2)], profile_of())
    assert found.steps == ()
    assert found.seconds == 0


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([Replicate()], [Replicate(), Replicate()], "2 axes: give one per axis"),
        ([Shard(3), Replicate()], [Replicate()] * 2, "dimensions 0 to 2"),
        ([Replicate()] * 2, [Partial(), Replicate()], "can't be converted"),
        (["shard", Replicate()], [Replicate()] * 2, r"give Shard\(dim\)"),
    ],
)
def test_what_can_not_be_converted(source, target, message):
    with pytest.raises(ConfigError, match=message):
        find_conversion(SHAPE, torch.float32, (2, 2), source, target, profile_of())


def test_a_profile_without_collectives():
    alone = replace(profile_of(), collectives=())
    with pytest.raises(ConfigError, match="booster profile-mesh --nproc 2"):
        find_conversion(SHAPE, torch.float32, (2,), [Shard(0)], [Replicate()], alone)
