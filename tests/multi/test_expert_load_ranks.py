"""Loads of experts in the records of a Monitor: under every plugin those of one process with the global batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from zoo import TRANSFORMERS_MODULES, get_model, split_batch

from booster import Booster
from booster.device import current_device
from booster.monitor import Monitor
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device
preload("booster.monitor", *TRANSFORMERS_MODULES)

hybrid = functools.partial(HybridParallelPlugin, precision="fp32")
PLUGINS = {
    "ddp": (2, lambda: TorchDDPPlugin(find_unused_parameters=True)),
    "zero 2": (2, lambda: LowLevelZeroPlugin(stage=2, precision="fp32")),
    "gemini": (2, lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=1e-3, search_range_m=1e-3)),
    "fsdp": (2, TorchFSDPPlugin),
    "ep 2": (2, lambda: hybrid(ep_size=2)),
    "ep 2 dp 2": (4, lambda: hybrid(ep_size=2, zero_stage=1)),
    "tp 2": (2, lambda: hybrid(tp_size=2)),
    "ep 2 tp 2": (4, lambda: hybrid(ep_size=2, tp_size=2)),
    "pp 2": (2, lambda: hybrid(pp_size=2, num_microbatches=2)),
    "ep 2 pp 2": (4, lambda: hybrid(ep_size=2, pp_size=2, num_microbatches=2)),
    "all_to_all": (
        2,
        lambda: hybrid(sp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"),
    ),
    "recomputed": (2, lambda: hybrid(ep_size=2, gradient_checkpoint_config=True)),
}
CASES = [("mixtral", plugin) for plugin in PLUGINS]
CASES += [("deepseek_v3_grouped", plugin) for plugin in ("ep 2", "fsdp", "pp 2")]
CASES += [("looping_classifier", plugin) for plugin in ("ddp", "gemini", "ep 2", "ep 2 dp 2")]


def train(name: str, plugin: str, across_ranks: bool = True) -> dict[str, Any]:
    """Returns the loads of two steps together."""
    booster, entry = Booster(plugin=PLUGINS[plugin][1]()), get_model(name)
    raw = entry.build()
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=1e-3))
    rank, size = getattr(booster.plugin, "dp_rank", dist.get_rank()), getattr(booster.plugin, "dp_size", 2)
    is_pipeline = "pp" in plugin
    with Monitor(model, optimizer, every=2, across_ranks=across_ranks) as monitor:
        for step in range(2):
            batch = split_batch(entry.make_batch(step, 4), rank, size)
            batch = {key: value.to(current_device()) for key, value in batch.items()}
            if is_pipeline:
                booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
            else:
                booster.backward(entry.loss(model, batch), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return monitor.record["experts"]


def train_alone(name: str) -> dict[str, Any]:
    booster, entry = Booster(device="cpu"), get_model(name)
    raw = entry.build()
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=1e-3))
    with Monitor(model, optimizer, every=2) as monitor:
        for step in range(2):
            booster.backward(entry.loss(model, entry.make_batch(step, 4)), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return monitor.record["experts"]


@pytest.mark.parametrize(("name", "plugin"), CASES)
def test_loads_are_those_of_one_process(name, plugin):
    expected = train_alone(name)
    assert all(sum(load["tokens"]) > 0 for load in expected.values())
    for found in run_ranks(train, PLUGINS[plugin][0], name, plugin, timeout=120):
        assert found.keys() == expected.keys()
        for layer, load in expected.items():
            assert found[layer]["tokens"] == load["tokens"]
            assert found[layer]["dropped"] == load["dropped"] == 0
            if load["entropy"] is None:
                assert found[layer]["entropy"] is None
            else:
                assert found[layer]["entropy"] == pytest.approx(load["entropy"], rel=1e-5)


def train_with_capacity() -> dict[str, Any]:
    PLUGINS["capacity"] = (2, lambda: hybrid(ep_size=2, capacity_factor=0.5, min_capacity=1))
    return train("mixtral", "capacity")


def test_a_capacity_counts_what_it_drops():
    whole = train_alone("mixtral")
    for found in run_ranks(train_with_capacity, 2):
        for layer, load in found.items():
            assert load["dropped"] > 0
            assert sum(load["tokens"]) + load["dropped"] == sum(whole[layer]["tokens"])
            assert len(set(load["tokens"])) < len(load["tokens"])  # full experts have equally many


def test_without_the_other_ranks_a_record_is_of_one_rank():
    whole = train_alone("mixtral")
    first, second = run_ranks(train, 2, "mixtral", "ep 2", False)
    for layer, load in whole.items():
        pairs = zip(first[layer]["tokens"], second[layer]["tokens"], strict=True)
        assert [sum(pair) for pair in pairs] == load["tokens"]
        assert first[layer]["tokens"] != load["tokens"]
