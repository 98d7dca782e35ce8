"""Groups of ranks are given back: by Booster.close(), and where no reference is left."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn

from booster import Booster, ConfigError, estimate_memory
from booster.comm import all_reduce_numbers, all_reduce_sum, new_cpu_group, new_group_of_rows, release_groups, transport
from booster.device import current_device
from booster.plugins import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

pytestmark = pytest.mark.on_device

PLUGINS = {
    "ddp": lambda replicas: TorchDDPPlugin(),
    "zero": lambda replicas: LowLevelZeroPlugin(stage=2, precision="fp32", extra_dp_size=replicas),
    "gemini": lambda replicas: GeminiPlugin(precision="fp32", extra_dp_size=replicas),
    "fsdp": lambda replicas: TorchFSDPPlugin(
        sharding_strategy="FULL_SHARD" if replicas == 1 else "HYBRID_SHARD",
        extra_dp_size=None if replicas == 1 else replicas,
    ),
    "hybrid": lambda replicas: HybridParallelPlugin(tp_size=replicas, pp_size=1, zero_stage=1, precision="fp32"),
}
KINDS = pytest.mark.parametrize("kind", list(PLUGINS))


def boosted(kind):
    """Returns a Booster, a boosted model and its optimizer, in groups of two ranks where there are four."""
    booster = Booster(plugin=PLUGINS[kind](2 if dist.get_world_size() == 4 else 1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return booster, model, optimizer


def train(model, optimizer, steps, *, first=0):
    losses = []
    for step in range(first, first + steps):
        loss = model(torch.full((2, 8), 1.0 + step, device=current_device())).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held():
    """Returns what this process holds: threads, open files, segments of shared memory, entries of torch's tables."""
    shared = [line.split()[-2:] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    return Counter(
        threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")),
        shared=len(shared),
        groups=len(dist.distributed_c10d._world.pg_map),
    )


def held_at_first():
    """Returns what is held with the group that the numbers of the world take where its own is a device's."""
    all_reduce_numbers([0.0])
    return held()


ROUNDS = pytest.mark.parametrize("rounds", [4, pytest.param(200, marks=pytest.mark.slow)])
WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]


@ROUNDS
@distributed(WORLDS, timeout=600)
def test_one_plugin_after_another_holds_no_more_than_one(rounds):
    assert_no_more_than_one_is_held(rounds, closes=True)


@pytest.mark.skipif(
    not hasattr(dist, "all_gather_single"),
    reason="before 2.13 torch never frees a mesh that a parameter was divided by",
)
@ROUNDS
@distributed(WORLDS, timeout=600, device="cpu")  # NCCL's groups are destroyed by close() alone
def test_plugins_that_are_forgotten_hold_no_more_than_one(rounds):
    assert_no_more_than_one_is_held(rounds, closes=False)


def assert_no_more_than_one_is_held(rounds, *, closes):
    seen, at_first = [], held_at_first()
    gc.freeze()  # what was there before needs no look at each collection
    for _ in range(rounds):
        for kind in PLUGINS:
            booster, model, optimizer = boosted(kind)
            train(model, optimizer, 1)
            if closes:
                booster.close()
            del booster, model, optimizer
            gc.collect()
        seen.append(held())
    gc.unfreeze()
    Booster(plugin=TorchDDPPlugin()).close()  # gives back what the last one has left
    first, last = seen[0], held()
    assert last["groups"] == at_first["groups"], last
    # Threads may be on their way out, and the world's own connections and memory are made when they are needed.
    for name in ("threads", "files", "shared"):
        assert all(one[name] <= first[name] + 4 for one in seen), (name, seen)


@distributed(world_size=2, device="cpu")  # as above
def test_without_a_run_of_the_garbage_collector_groups_are_bounded():
    gc.disable()
    try:
        counts = []
        for _ in range(24):
            _, model, optimizer = boosted("hybrid")
            train(model, optimizer, 1)
            counts.append(held()["groups"])
    finally:
        gc.enable()
    assert max(counts) <= 24, counts  # of 4 a plugin


@KINDS
@distributed(world_size=4)
def test_a_model_continues_without_its_booster(kind):
    booster, model, optimizer = boosted(kind)
    expected = train(model, optimizer, 5)
    _, model, optimizer = boosted(kind)
    losses = train(model, optimizer, 2)
    del booster, _
    for other in PLUGINS:
        gc.collect()
        boosted(other)
    assert losses + train(model, optimizer, 3, first=2) == expected


@KINDS
@distributed(world_size=4)
def test_what_was_closed_is_not_used_any_more(kind):
    before = held_at_first()["groups"]
    booster, model, optimizer = boosted(kind)
    losses = train(model, optimizer, 2)
    x = torch.ones(2, 8, device=booster.device)
    loss = model(x).mean()
    booster.close()
    booster.close()
    assert held()["groups"] == before
    with pytest.raises(ConfigError, match="is closed"):
        model(x)
    with pytest.raises(ConfigError, match="is closed"):
        booster.backward(loss, optimizer)
    with pytest.raises(ConfigError, match="is closed"):
        optimizer.step()
    with pytest.raises(ConfigError, match="is closed"):
        booster.save_model(model, "nowhere")
    with pytest.raises(ConfigError, match="is closed"):
        booster.boost(nn.Linear(2, 2))
    _, model, optimizer = boosted(kind)
    assert train(model, optimizer, 2) == losses


@distributed(world_size=1)
def test_closing_a_booster_without_a_plugin():
    booster = Booster(device="cpu")
    model, *_ = booster.boost(nn.Linear(2, 2))
    booster.close()
    with pytest.raises(ConfigError, match="is closed"):
        model(torch.ones(2, 2))


@distributed(world_size=4)
def test_closing_unmaps_the_memory_of_a_group():
    rows = [[0, 1], [2, 3]]
    group = new_group_of_rows(rows)
    before = held()["shared"]
    through = transport(group)
    ones = torch.ones(4, device=current_device())
    all_reduce_sum(ones, group)
    assert held()["shared"] > before or through != "shared memory"
    dist.barrier()
    release_groups([group])
    assert held()["shared"] == before
    with pytest.raises(ConfigError, match=r"Booster.close\(\) has released"):
        all_reduce_sum(ones, group)


@distributed(world_size=2)
def test_names_of_groups_that_were_given_back_do_not_come_again():
    names = set()
    for number in range(3):
        group = new_cpu_group(dist.group.WORLD)
        names.add(group.group_name)
        assert all_reduce_sum(torch.ones(1), group).item() == 2 if number % 2 else True
        dist.barrier()
        release_groups([group])
        # Ranks collect garbage at different times.
        if dist.get_rank() == number % 2:
            del group
    assert len(names) == 3


@distributed(world_size=2)
def test_groups_of_the_users_are_left_alone():
    mine = dist.new_group([0, 1])
    booster = Booster(plugin=TorchFSDPPlugin(process_group=mine))
    model = nn.Linear(8, 8)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    train(model, optimizer, 1)
    booster.close()
    dist.barrier(mine)
    dist.destroy_process_group(mine)


@distributed(2)
def test_estimates_by_name_release_their_groups():
    all_reduce_numbers([0.0])
    before = len(dist.distributed_c10d._world.pg_map)
    for name, settings in (("torch_ddp", {}), ("hybrid_parallel", {"tp_size": 1, "pp_size": 1, "precision": "fp32"})):
        estimate_memory(
            nn.Linear(8, 8),
            name,
            settings=settings,
            batch=torch.ones(2, 8),
            criterion=lambda outputs, _: outputs.mean(),
        )
        assert len(dist.distributed_c10d._world.pg_map) == before, name
    num_made = dist.distributed_c10d.get_pg_count()
    with pytest.raises(ConfigError, match="fp17"):
        Booster(plugin="torch_ddp", mixed_precision="fp17")
    assert dist.distributed_c10d.get_pg_count() == num_made
