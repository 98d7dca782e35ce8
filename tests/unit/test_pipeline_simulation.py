"""Simulated schedules: their lengths, bubbles and kept activations are those that theory has, up to 64 stages."""

from __future__ import annotations

import pytest

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import (
    Action,
    ActionKind,
    Costs,
    schedule_from_name,
    simulate,
)

# A step of a microbatch on a stage: 1 forward, 1 for inputs, 1 for weights, or as a user's model may have it.
COSTS = [Costs(), Costs(forward=2.0, backward_input=3.0, weight=1.5)]


def cost_of_one(costs):
    return costs.forward + costs.backward_input + costs.weight


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 8), (4, 3), (8, 32), (64, 10), (64, 128)])
def test_one_chunk(name, p, m, costs):
    timeline = simulate(schedule_from_name(name), p, m, costs=costs)
    t = cost_of_one(costs)
    assert timeline.length == pytest.approx((m + p - 1) * t)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.busy == pytest.approx([m * t] * p)
    peaks = [m] * p if name == "gpipe" else [min(m, p - stage) for stage in range(p)]
    assert list(timeline.peak_live) == list(timeline.peak_pending) == peaks


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (2, 4, 2), (2, 6, 4), (4, 4, 3), (8, 32, 2), (64, 128, 2)])
def test_interleaved_with_whole_groups(p, m, v, costs):
    timeline = simulate(schedule_from_name("interleaved"), p, m, v, costs)
    t = cost_of_one(costs)
    length = m * t + (p - 1) * t / v
    assert timeline.length == pytest.approx(length)
    assert timeline.bubble_fraction == pytest.approx((p - 1) * t / v / length)
    # The warm-up of Narayanan et al. 2021, and the first forward of the steady state.
    assert list(timeline.peak_live) == [min(m * v, (v - 1) * p + 2 * (p - stage - 1) + 1) for stage in range(p)]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_with_any_number_of_microbatches(p, v, costs):
    t = cost_of_one(costs)
    for m in [1, 2, 3, 4, 5, 7, 8, 9, 11, 14, 16]:
        timeline = simulate(schedule_from_name("interleaved"), p, m, v, costs)
        # No longer than with whole groups; fewer than p can't fill the pipeline, and take p times a chunk each round.
        assert timeline.length == pytest.approx(max(m, p) * t + (min(m, p) - 1) * t / v)
        largest_group = -(-m // max(1, m // p))
        assert max(timeline.peak_live) == min(m * v, (v - 1) * largest_group + 2 * (p - 1) + 1)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (2, 3), (2, 16), (3, 5), (4, 6), (8, 14), (8, 15), (64, 128)])
def test_zbv_has_no_bubble_but_the_ramp(p, m):
    costs = Costs(forward=2.0, backward_input=2.0, weight=2.0)  # a chunk's F, B and W are one beat each
    timeline = simulate(schedule_from_name("zbv"), p, m, 2, costs)
    # Stage p - 1 can't start before p - 1 others have done a forward: no schedule of this V is shorter.
    assert timeline.length == 6 * m + p - 1
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (6 * m + p - 1))
    # As much as the first stage of 1F1B keeps, on every stage: p microbatches of two chunks.
    assert max(timeline.peak_live) <= max(timeline.peak_pending) <= 2 * p
    if m >= 2 * p - 1:
        firsts = [timeline.starts[stage, Action(ActionKind.FORWARD, 0)] for stage in range(p)]
        lasts = [max(start for (at, _), start in timeline.starts.items() if at == stage) for stage in range(min(p, 8))]
        assert firsts == list(range(p))
        assert lasts == [stage + 6 * m - 1 for stage in range(min(p, 8))]  # they work without a pause
        assert list(timeline.peak_pending) == [2 * p] * p


def test_zbv_takes_little_more_than_the_work_on_two_stages():
    for m in [4, 8, 16]:
        assert simulate(schedule_from_name("zbv"), 2, m, 2).length <= 1.05 * m * 3.0


@pytest.mark.parametrize(("p", "m"), [(4, 1), (4, 3), (8, 2), (8, 8), (8, 13)])
def test_zbv_with_few_microbatches(p, m):
    costs = Costs(forward=2.0, backward_input=2.0, weight=2.0)
    length = simulate(schedule_from_name("zbv"), p, m, 2, costs).length
    # At least the ramp and all work, or one microbatch's way there and back and its last weight.
    least = max(6 * m + p - 1, 4 * p + 1)
    assert least <= length <= max(6 * m + p - 1, 4 * p + 3 * m) * 1.1


def test_deferred_weights_keep_activations_longer():
    timeline = simulate(schedule_from_name("zbv"), 2, 2, 2)
    assert timeline.peak_live == (3, 4)
    assert timeline.peak_pending == (3, 4)
    starts = timeline.starts
    assert (
        starts[1, Action(ActionKind.BACKWARD, 1, 1)] < starts[1, Action(ActionKind.BACKWARD_WEIGHT, 0, 0)]
    )  # inputs go first at the end


def test_forward_only():
    for name, v in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]:
        timeline = simulate(schedule_from_name(name), 4, 8, v, Costs(forward=3.0), forward_only=True)
        assert timeline.length == pytest.approx(8 * 3.0 + 3 * 3.0 / v)
        assert timeline.peak_live == (0, 0, 0, 0)
        assert {work.kind for _, work in timeline.starts} == {ActionKind.FORWARD}


def test_messages_take_time_between_stages_but_not_within():
    costs = Costs(forward=2.0, backward_input=2.0, weight=2.0, message=0.5)
    assert simulate(schedule_from_name("1f1b"), 3, 1, costs=costs).length == 3 * 6 + 4 * 0.5
    # Down and up the V, and the same way back: one message each between two stages, none at the turn.
    starts = simulate(schedule_from_name("zbv"), 2, 1, 2, costs).starts
    assert starts[1, Action(ActionKind.FORWARD, 0, 0)] == 1.5
    assert starts[1, Action(ActionKind.FORWARD, 0, 1)] == 2.5
    assert starts[0, Action(ActionKind.FORWARD, 0, 1)] == 4.0
