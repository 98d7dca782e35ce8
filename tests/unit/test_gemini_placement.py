"""Placement policies: where chunks live, how many may be gathered, never over the budget."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.gemini.config import PlacementConfig
from booster.plugins.gemini.model import place_buffers
from booster.plugins.gemini.placement import (
    AutoPlacement,
    ChunkBytes,
    ChunkLocations,
    ConstPlacement,
    StaticPlacement,
    Trace,
    TraceEvent,
    resident_bytes,
)

NOTHING = frozenset()


def make_placement(policy_name, *, max_prefetch=0, budget=None, **arguments):
    options = {"placement_policy": policy_name, "max_prefetch": max_prefetch, "device_memory_budget": budget}
    return PlacementConfig(**options, **arguments).make(torch.device("cpu"))


def chunk_bytes(payload, *, num_ranks=2, trains=True):
    shard = payload // num_ranks
    return ChunkBytes(
        gathered=payload, weights=shard, gradients=shard if trains else 0, states=3 * shard if trains else 0
    )


def equal_chunks(num_chunks, payload=100, **options):
    return [chunk_bytes(payload, **options) for _ in range(num_chunks)]


def random_sizes(generator, min_trained=0):
    num_ranks = generator.choice([1, 2, 4])
    sizes = [
        chunk_bytes(8 * generator.randrange(1, 200), num_ranks=num_ranks, trains=generator.random() < 0.8)
        for _ in range(generator.randrange(1, 12))
    ]
    return sizes + equal_chunks(min_trained, 80, num_ranks=num_ranks)


def moment(*chunks, is_backward=False, other_bytes=0):
    return TraceEvent(chunks=chunks, is_backward=is_backward, other_bytes=other_bytes)


def random_record(generator, num_chunks, most_other=500):
    forward = [tuple(generator.sample(range(num_chunks), generator.choice([1, 1, min(2, num_chunks)])))]
    while generator.random() < 0.9:
        forward.append(tuple(generator.sample(range(num_chunks), 1)))
    moments = [moment(*chunks, other_bytes=generator.randrange(most_other)) for chunks in forward]
    for chunks in reversed(forward):
        moments.append(moment(*chunks, is_backward=True, other_bytes=generator.randrange(most_other)))
    return Trace(tuple(moments))


def plain_record(*chunks, other_bytes=0):
    forward = [moment(chunk, other_bytes=other_bytes) for chunk in chunks]
    backward = [moment(chunk, is_backward=True, other_bytes=other_bytes) for chunk in reversed(chunks)]
    return Trace((*forward, *backward))


def payload_sum(sizes, chunks):
    return sum(sizes[chunk].gathered for chunk in chunks)


def least_at(sizes, locations, at):
    """What must be there at a moment: its weights that are not kept, and its gradient buffers."""
    weights = payload_sum(sizes, set(at.chunks) - locations.kept_gathered)
    return weights + (payload_sum(sizes, [c for c in at.chunks if sizes[c].trains]) if at.is_backward else 0)


# Fractions.


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 100))])
def test_fractions_take_the_fewest_chunks_from_the_end_that_are_enough(seed):
    generator = random.Random(seed)
    sizes = random_sizes(generator)
    training = [chunk for chunk, size in enumerate(sizes) if size.trains]
    everything = set(range(len(sizes)))
    previous = ChunkLocations(kept_gathered=frozenset(everything))
    for tenths in range(11):
        fraction = tenths / 10
        locations = StaticPlacement(
            shard_param_frac=fraction, offload_optim_frac=fraction, offload_param_frac=fraction
        ).locations(sizes, None)
        for chosen, among in (
            (locations.weights, sorted(everything)),
            (locations.states, training),
            (everything - locations.kept_gathered, sorted(everything)),
        ):
            total = payload_sum(sizes, among)
            assert 10 * payload_sum(sizes, chosen) >= tenths * total
            if chosen:
                assert 10 * payload_sum(sizes, chosen - {min(chosen)}) < tenths * total
            assert sorted(chosen) == among[len(among) - len(chosen) :]
        assert previous.weights <= locations.weights
        assert previous.states <= locations.states
        assert previous.kept_gathered >= locations.kept_gathered
        assert not locations.kept_gathered & locations.weights
        previous = locations
    assert locations == ChunkLocations(weights=frozenset(everything), states=frozenset(training))
    zero = StaticPlacement(shard_param_frac=0.0).locations(sizes, None)
    assert zero == ChunkLocations(kept_gathered=frozenset(everything))


def test_written_fractions_are_meant_as_written():
    # 0.7 * 10 is 7.000000000000001 for a sum of floats: an eighth chunk must not be taken for it.
    sizes = equal_chunks(10)
    for tenths in range(11):
        locations = StaticPlacement(offload_optim_frac=tenths * 0.1 if tenths == 10 else tenths / 10).locations(
            sizes, None
        )
        assert len(locations.states) == tenths
    assert len(StaticPlacement(offload_optim_frac=1e-9).locations(sizes, None).states) == 1


def test_chunks_that_do_not_train_have_no_states_to_offload_but_weights():
    sizes = [*equal_chunks(2), *equal_chunks(2, trains=False)]
    locations = StaticPlacement(offload_optim_frac=0.5, offload_param_frac=0.5).locations(sizes, None)
    assert locations == ChunkLocations(weights=frozenset({2, 3}), states=frozenset({1}))


def test_chunks_without_known_states_are_offloaded_all_the_same():
    sizes = [ChunkBytes(gathered=8, weights=4, gradients=4, states=0) for _ in range(4)]
    assert StaticPlacement(offload_optim_frac=0.5).locations(sizes, None).states == {2, 3}


def test_static_homes_do_not_move_after_the_first_iteration():
    sizes = equal_chunks(4)
    placement = StaticPlacement(shard_param_frac=0.5, offload_param_frac=0.25, offload_optim_frac=0.75)
    assert placement.locations(sizes, None) == placement.locations(sizes, plain_record(3, 2, 1, 0))


def test_the_ends_have_names():
    sizes = equal_chunks(3)
    assert make_placement("cpu").locations(sizes, None) == ChunkLocations(
        weights=frozenset(range(3)), states=frozenset(range(3))
    )
    assert make_placement("cuda").locations(sizes, None) == ChunkLocations()


# Memory budget.


def test_static_budget_is_the_payloads_that_are_asked_for():
    sizes = [chunk_bytes(80), chunk_bytes(100), chunk_bytes(60)]
    assert StaticPlacement().gather_budget(sizes, ChunkLocations(), None, 0) == 200
    assert StaticPlacement(max_prefetch=2).gather_budget(sizes, ChunkLocations(), None, 0) == 400
    kept = ChunkLocations(kept_gathered=frozenset({1}))
    assert StaticPlacement(max_prefetch=2).gather_budget(sizes, kept, None, 0) == 3 * 80 + 100
    assert (
        StaticPlacement(max_prefetch=2).gather_budget(
            sizes, ChunkLocations(kept_gathered=frozenset({0, 1, 2})), None, 0
        )
        == 100
    )
    frozen = [chunk_bytes(100, trains=False), chunk_bytes(40)]
    assert StaticPlacement().gather_budget(frozen, ChunkLocations(), None, 0) == 140


def test_a_module_of_several_chunks_gets_all_of_them():
    sizes = equal_chunks(4)
    record = Trace((moment(0, 1, 2), moment(3), moment(0, 1, 2, is_backward=True)))
    budgets = [StaticPlacement(max_prefetch=1).gather_budget(sizes, ChunkLocations(), record, now) for now in range(4)]
    assert budgets == [400, 300, 700, 300]
    needed = 600
    with pytest.raises(ConfigError, match=f"at least {needed}"):
        ConstPlacement(budget=needed - 1).locations(sizes, record)
    locations = ConstPlacement(budget=needed).locations(sizes, record)
    assert ConstPlacement(budget=needed).gather_budget(sizes, locations, record, 2) == needed


def test_a_static_budget_gives_fewer_payloads_before_it_is_refused():
    sizes = equal_chunks(4, payload=100)  # shards at home: 4 * (50 + 50 + 150)
    for budget, gathered in ((2000, 500), (1400, 400), (1250, 250), (1200, 200)):
        placement = StaticPlacement(max_prefetch=3, budget=budget)
        assert placement.gather_budget(sizes, placement.locations(sizes, None), None, 0) == gathered
    with pytest.raises(ConfigError, match=r"device_memory_budget=1199 is too small.* at least 1200.*offload more"):
        StaticPlacement(max_prefetch=3, budget=1199).locations(sizes, None)
    with pytest.raises(ConfigError, match="at least 1230"):
        StaticPlacement(budget=1229).locations(sizes, plain_record(0, 1, other_bytes=30))


def test_without_a_budget_everything_fits():
    sizes = [*equal_chunks(2), *equal_chunks(1, trains=False)]
    for placement in (ConstPlacement(), AutoPlacement()):
        for record in (None, plain_record(0, 1, 2, other_bytes=10**9)):
            assert placement.locations(sizes, record) == ChunkLocations()
            assert placement.gather_budget(sizes, ChunkLocations(), record, 0) == 500


# Budgets.


def random_placement(generator, budget):
    max_prefetch = generator.randrange(4)
    return generator.choice(
        [
            StaticPlacement(
                shard_param_frac=generator.choice([0.5, 1.0]),
                offload_param_frac=generator.choice([0.0, 0.4]),
                offload_optim_frac=generator.random(),
                max_prefetch=max_prefetch,
                budget=budget,
            ),
            ConstPlacement(budget=budget, max_prefetch=max_prefetch),
            AutoPlacement(
                budget=budget,
                steady_ratio=generator.choice([0.3, 0.9, 1.0]),
                warmup_ratio=generator.choice([0.0, 0.8, 1.0]),
                gpu_margin_mem_ratio=generator.choice([0.0, 0.5, 1.0]),
                max_prefetch=max_prefetch,
            ),
        ]
    )


@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 400))]
)
def test_never_over_the_budget_and_never_under_what_is_needed(seed):
    generator = random.Random(seed)
    sizes = random_sizes(generator, min_trained=1)
    record = generator.choice([None, random_record(generator, len(sizes))])
    budget = generator.choice([100, 3000, 10000, 40000])
    placement = random_placement(generator, budget)
    try:
        locations = placement.locations(sizes, record)
    except ConfigError as refusal:
        needed = int(re.search(r"at least (\d+)", str(refusal))[1])
        assert needed > budget
        replace(placement, budget=needed).locations(sizes, record)
        with pytest.raises(ConfigError):
            replace(placement, budget=needed - 1).locations(sizes, record)
        return
    assert locations.states <= {chunk for chunk, size in enumerate(sizes) if size.trains}
    resident = resident_bytes(sizes, locations)
    largest = max(
        [size.gathered for chunk, size in enumerate(sizes) if chunk not in locations.kept_gathered], default=0
    )
    two = largest + max(size.gathered for size in sizes if size.trains)
    for now, at in enumerate(record.events if record else (moment(),)):
        gathered = placement.gather_budget(sizes, locations, record, now)
        assert gathered >= max(two, least_at(sizes, locations, at))
        counts_others = record is not None and not isinstance(placement, ConstPlacement)
        others = max(later.other_bytes for later in record.events[now : now + 2]) if counts_others else 0
        assert resident + gathered + others <= budget * getattr(placement, "steady_ratio" if record else "", 1)
    beyond = placement.gather_budget(sizes, locations, record, len(record.events) if record else 0)
    assert two <= beyond <= budget - resident


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 100))])
@pytest.mark.parametrize("with_record", [False, True])
def test_larger_budgets_never_send_parts_away(seed, with_record):
    generator = random.Random(seed)
    sizes = random_sizes(generator, min_trained=1)
    record = random_record(generator, len(sizes)) if with_record else None
    for policy in (ConstPlacement, AutoPlacement):
        locations = []
        for budget in (*range(2000, 40000, 1000), 10**6):
            try:
                locations.append(policy(budget=budget).locations(sizes, record))
            except ConfigError:
                assert not locations  # small ones are refused, none above
        assert all(more.weights <= less.weights and more.states <= less.states for less, more in pairwise(locations))
        assert locations[-1].weights == NOTHING


def test_const_fills_first_with_weights_then_with_states():
    sizes = equal_chunks(3)  # per chunk: 100 of weights and gradients, 150 of states; payloads need 200
    everything, states = frozenset(range(3)), frozenset(range(3))
    for budget, locations in (
        (200, ChunkLocations(weights=everything, states=states)),
        (299, ChunkLocations(weights=everything, states=states)),
        (300, ChunkLocations(weights=frozenset({1, 2}), states=states)),
        (499, ChunkLocations(weights=frozenset({2}), states=states)),
        (500, ChunkLocations(states=states)),
        (650, ChunkLocations(states=frozenset({1, 2}))),
        (949, ChunkLocations(states=frozenset({2}))),
        (950, ChunkLocations()),
    ):
        placement = ConstPlacement(budget=budget)
        assert placement.locations(sizes, None) == locations
        assert placement.gather_budget(sizes, locations, None, 0) == budget - resident_bytes(sizes, locations)
    with pytest.raises(ConfigError, match=r"device_memory_budget=199 .* at least 200.*min_chunk_size_m"):
        ConstPlacement(budget=199).locations(sizes, None)


def test_prefetched_payloads_come_before_parts():
    sizes = equal_chunks(3)
    assert ConstPlacement(budget=499, max_prefetch=2).locations(sizes, None).weights == {0, 1, 2}
    assert ConstPlacement(budget=500, max_prefetch=2).locations(sizes, None).weights == {1, 2}
    assert (
        ConstPlacement(budget=250, max_prefetch=2).gather_budget(
            sizes, make_placement("cpu").locations(sizes, None), None, 0
        )
        == 250
    )


def test_auto_leaves_most_for_activations_while_nothing_is_known():
    sizes = equal_chunks(4)
    placement = AutoPlacement(budget=4000, warmup_ratio=0.8)
    locations = placement.locations(sizes, None)
    assert locations == ConstPlacement(budget=800).locations(sizes, None)
    assert placement.gather_budget(sizes, locations, None, 0) == 800 - resident_bytes(sizes, locations)
    # A small budget still gives the payloads.
    placement = AutoPlacement(budget=1000, warmup_ratio=0.8, max_prefetch=1)
    assert placement.locations(sizes, None) == make_placement("cpu").locations(sizes, None)
    assert placement.gather_budget(sizes, placement.locations(sizes, None), None, 0) == 300
    assert (
        AutoPlacement(budget=250, max_prefetch=5).gather_budget(
            sizes, make_placement("cpu").locations(sizes, None), None, 0
        )
        == 250
    )


def test_auto_gives_what_activations_leave():
    sizes = equal_chunks(3)
    bytes_of_moments = [100, 700, 300, 300, 200, 0]
    moments = [
        moment(chunk, is_backward=now >= 3, other_bytes=bytes_of_moments[now])
        for now, chunk in enumerate((2, 0, 1, 1, 0, 2))
    ]
    record = Trace(tuple(moments))
    # 0.9 * 1500 = 1350. The peak of 700 and 200 of payloads leave 450: for all weights and one chunk's states.
    placement = AutoPlacement(budget=1500)
    locations = placement.locations(sizes, record)
    assert locations == ChunkLocations(states=frozenset({0, 1}))  # chunk 2 is used first
    budgets = [placement.gather_budget(sizes, locations, record, now) for now in range(7)]
    assert budgets == [200, 200, 600, 600, 700, 900, 900]
    assert AutoPlacement(budget=1300).locations(sizes, record) == ChunkLocations(
        weights=frozenset({1}), states=frozenset({0, 1, 2})
    )
    with pytest.raises(ConfigError, match=r"at least 1000.*min_chunk_size_m"):
        AutoPlacement(budget=999).locations(sizes, record)
    assert AutoPlacement(budget=1000).locations(sizes, record) == make_placement("cpu").locations(sizes, None)


def test_auto_gives_states_a_part_of_what_is_left():
    sizes = equal_chunks(4)
    record = plain_record(0, 1, 2, 3)
    # 1200 less 200 of payloads and 400 of weights and gradients leave 600, four times the states of a chunk.
    for ratio, num_offloaded in ((0.0, 0), (1.0, 0), (0.5, 2), (0.6, 2), (0.75, 1), (0.2, 4)):
        placement = AutoPlacement(budget=1200, steady_ratio=1.0, gpu_margin_mem_ratio=ratio)
        assert placement.locations(sizes, record) == ChunkLocations(states=frozenset(range(4 - num_offloaded, 4)))


def test_chunks_that_are_never_used_are_offloaded_first():
    sizes = equal_chunks(3)
    placement = ConstPlacement(budget=400)
    assert placement.locations(sizes, plain_record(2, 1)).weights == {0}
    assert placement.locations(sizes, plain_record(2, 0)).weights == {1}


def test_homes_of_another_record_are_refused_where_they_do_not_fit():
    sizes = equal_chunks(3)
    placement = AutoPlacement(budget=2000, warmup_ratio=0.0)
    locations = placement.locations(sizes, None)
    with pytest.raises(ConfigError, match="in addition to the 750 bytes of shards"):
        placement.gather_budget(sizes, locations, plain_record(0, 1, 2, other_bytes=1000), 0)


# Arguments.


@pytest.mark.parametrize("name", ["shard_param_frac", "offload_optim_frac", "offload_param_frac"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "half", None, True])
def test_fractions_that_can_not_be(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} is not a fraction"):
        make_placement("static", **{name: value})


@pytest.mark.parametrize("name", ["warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "half", None])
def test_ratios_that_can_not_be(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} is not a fraction"):
        make_placement("auto", **{name: value})


@pytest.mark.parametrize("policy_name", ["static", "cpu", "cuda", "const", "auto"])
def test_counts_that_can_not_be(policy_name):
    for value in (-1, 1.0, True, None):
        with pytest.raises(ConfigError, match=f"max_prefetch={value!r} is not a number"):
            make_placement(policy_name, max_prefetch=value)
    for value in (0, -5, 1e9, True, "8GiB"):
        with pytest.raises(ConfigError, match=f"device_memory_budget={value!r} is not a number"):
            make_placement(policy_name, budget=value)


def test_weights_can_not_be_gathered_and_away():
    with pytest.raises(ConfigError, match=r"offload_param_frac=0.6 is more than shard_param_frac=0.5.*such as 1.0"):
        make_placement("static", shard_param_frac=0.5, offload_param_frac=0.6)


def test_no_memory_to_train_in():
    with pytest.raises(ConfigError, match="steady_cuda_cap_ratio=0 leaves no memory"):
        make_placement("auto", steady_cuda_cap_ratio=0)


@pytest.mark.parametrize("policy_name", ["Auto", "nvme", None, 3, []])
def test_policies_that_are_not_known(policy_name):
    with pytest.raises(ConfigError, match=r"placement_policy=.* is unknown: choose one of 'static'"):
        make_placement(policy_name)


@pytest.mark.parametrize(
    ("policy_name", "owner", "given"),
    [
        ("auto", "static", {"offload_optim_frac": 0.5}),
        ("cpu", "static", {"shard_param_frac": 0.0}),
        ("cuda", "static", {"offload_param_frac": 1.0}),
        ("static", "auto", {"gpu_margin_mem_ratio": 0.5}),
        ("const", "auto", {"steady_cuda_cap_ratio": 0.5}),
        ("cpu", "auto", {"warmup_non_model_data_ratio": 0.5}),
    ],
)
def test_what_a_policy_would_not_look_at_is_refused(policy_name, owner, given):
    (name,) = given
    with pytest.raises(
        ConfigError, match=f"{name}=.* is for placement_policy='{owner}', and has no effect for '{policy_name}'"
    ):
        make_placement(policy_name, **given)


def test_arguments_reach_the_policy():
    assert make_placement(
        "static", shard_param_frac=0.9, offload_optim_frac=0.1, offload_param_frac=0.2, max_prefetch=3, budget=4
    ) == StaticPlacement(shard_param_frac=0.9, offload_optim_frac=0.1, offload_param_frac=0.2, max_prefetch=3, budget=4)
    assert make_placement(
        "auto",
        warmup_non_model_data_ratio=0.1,
        steady_cuda_cap_ratio=0.2,
        gpu_margin_mem_ratio=0.3,
        max_prefetch=4,
        budget=5,
    ) == AutoPlacement(budget=5, steady_ratio=0.2, warmup_ratio=0.1, gpu_margin_mem_ratio=0.3, max_prefetch=4)
    assert make_placement("const", max_prefetch=1, budget=2) == ConstPlacement(budget=2, max_prefetch=1)


def test_tied_buffers_stay_tied_where_they_are_moved():
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    model[0].register_buffer("shift", torch.ones(2))
    model[1].register_buffer("shift", model[0].shift)
    place_buffers(model, torch.device("meta"))
    assert model[0].shift is model[1].shift
    assert model[0].shift.is_meta
