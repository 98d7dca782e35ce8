"""Loads of experts in the records of a Monitor: under every plugin those of one process with the global batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload, run_ranks
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model, split_batch
from zoo.experts import ListedExperts

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
    "tp 1": (1, hybrid),
    "tp 2": (2, lambda: hybrid(tp_size=2)),
    "ep 2 tp 2": (4, lambda: hybrid(ep_size=2, tp_size=2)),
    "pp 2": (2, lambda: hybrid(pp_size=2, num_microbatches=2)),
    "ep 2 pp 2": (4, lambda: hybrid(ep_size=2, pp_size=2, num_microbatches=2)),
    "all_to_all": (
        2,
        lambda: hybrid(sp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"),
    ),
    "ep 2 all_to_all": (
        4,
        lambda: hybrid(ep_size=2, sp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"),
    ),
    "recomputed": (2, lambda: hybrid(ep_size=2, gradient_checkpoint_config=True)),
}
CASES = [("mixtral", plugin) for plugin in PLUGINS]
CASES += [("deepseek_v3_grouped", plugin) for plugin in ("ep 2", "fsdp", "pp 2")]
CASES += [("looping_classifier", plugin) for plugin in ("ddp", "gemini", "ep 2", "ep 2 dp 2")]
# Blocks of zeros for the experts that a token does not have; one-hot choices; layers in one list.
CASES += [(name, plugin) for name in ("Llama4ForCausalLM", "switch") for plugin in ("fsdp", "ep 2")]
CASES += [("routed_classifier", plugin) for plugin in ("ddp", "ep 2")]


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


def count_routing(name: str, samples: slice = slice(None)) -> dict[str, list[int]]:
    """Returns the tokens of each expert in a forward of plain torch with the global batch, by hooks of this test."""
    entry, counts = get_model(name), {}
    model = entry.build()
    for key, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and key.endswith("experts"):
            counts[key] = [0] * len(module)
            for number, expert in enumerate(module):

                def count(_, args, found=counts[key], number=number):
                    found[number] += len(args[0])

                expert.register_forward_pre_hook(count)
        elif key.endswith("experts"):

            def keep(module, args, key=key):
                counts[key] = [int((args[1] == number).sum()) for number in range(module.num_experts)]

            module.register_forward_pre_hook(keep)
    entry.loss(model, {key: value[samples] for key, value in entry.make_batch(0, 4).items()})
    return counts


def train_and_get_loads(name: str, plugin: str) -> dict[str, list[int]]:
    """Returns `expert_loads()` after the first batch, which comes after another one and before one of another model."""
    booster, entry = Booster(plugin=PLUGINS[plugin][1]()), get_model(name)
    boosted = []
    for _ in range(2):
        raw = entry.build()
        boosted.append(booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=1e-3))[:2])
    (model, _), (other, _) = boosted
    assert model.expert_loads() == {}
    for step, (one, optimizer) in ((1, boosted[0]), (0, boosted[0]), (2, boosted[1])):
        batch = split_batch(entry.make_batch(step, 4), booster.plugin.dp_rank, booster.plugin.dp_size)
        batch = {key: value.to(current_device()) for key, value in batch.items()}
        if "pp" in plugin:
            booster.execute_pipeline(iter([batch]), one, lambda outputs, _: outputs.loss, optimizer)
        else:
            booster.backward(entry.loss(one, batch), optimizer)
        optimizer.zero_grad()
    loads, others = ({key: load.tolist() for key, load in one.expert_loads().items()} for one in (model, other))
    assert others.keys() == loads.keys()
    assert not loads or others != loads
    return loads


LAST_FORWARD_CASES = [("mixtral", plugin) for plugin in PLUGINS if plugin.startswith(("ep", "recomputed"))]
LAST_FORWARD_CASES += [("looping_classifier", "ep 2"), ("looping_classifier", "ep 2 dp 2")]


@pytest.mark.parametrize(("name", "plugin"), LAST_FORWARD_CASES)
def test_expert_loads_are_counted_routing(name, plugin):
    # The last forward is that of the last microbatch, with one of the two samples of a rank.
    expected = count_routing(name, slice(1, None, 2) if "pp" in plugin else slice(None))
    found = run_ranks(train_and_get_loads, PLUGINS[plugin][0], name, plugin, timeout=120)
    for loads in found:
        assert loads == {key: expected[key] for key in loads}
    assert {key for loads in found for key in loads} == expected.keys()


def test_expert_loads_need_expert_parallelism():
    assert run_ranks(train_and_get_loads, 1, "mixtral", "tp 1") == [{}]


@distributed(2)
def test_expert_loads_count_what_a_capacity_drops():
    model, _ = boosted(Booster(plugin=hybrid(ep_size=2, capacity_factor=0.5, min_capacity=1)))
    model(own_index())
    assert model.expert_loads()["experts"].tolist() == [5, 3, 3, 4]


def assert_loads_are_those_of_one_process(name: str, plugin: str) -> None:
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


@pytest.mark.parametrize(("name", "plugin"), CASES)
def test_loads_are_those_of_one_process(name, plugin):
    assert_loads_are_those_of_one_process(name, plugin)


def test_tokens_without_a_score_are_not_dropped():
    assert_loads_are_those_of_one_process("Llama4ForCausalLM", "ep 2")


class Given(nn.Module):
    """Experts whose tokens are routed as the batch says; an expert 4 is none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = ListedExperts(4, 8)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        tokens = torch.ones(len(index), 8, device=index.device)
        return self.experts(tokens, index, torch.full(index.shape, 0.5, device=index.device))


def own_index() -> torch.Tensor:
    index = [[0, 1], [0, 2], [0, 3], [0, 1]] if dist.get_rank() == 0 else [[2, 3], [2, 4], [1, 3], [3, 0]]
    return torch.tensor(index, device=current_device())


def boosted(booster: Booster) -> tuple[Any, Any]:
    raw = Given()
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    return model, optimizer


@distributed(2)
def test_a_capacity_counts_what_it_drops():
    # 4 tokens of 2 experts each: 0.5 * 8 / 4 is 1, and rounded up to an even number 2.
    booster = Booster(plugin=hybrid(ep_size=2, capacity_factor=0.5, min_capacity=1))
    model, optimizer = boosted(booster)
    with Monitor(model, optimizer) as monitor:
        for _ in range(2):
            booster.backward(model(own_index()).square().mean(), optimizer)
        optimizer.step()
    # In a forward rank 0 keeps 2, 2, 1, 1 of 4, 2, 1, 1; rank 1 keeps 1, 1, 2, 2 of 1, 1, 2, 3, and has one of none.
    assert monitor.record["experts"] == {
        "experts": {"tokens": [6, 6, 6, 6], "dropped": 2 * (2 + 1 + 1), "entropy": None}
    }


@distributed(2)
def test_another_model_of_the_plugin_does_not_count():
    booster = Booster(plugin=hybrid(ep_size=2))
    (model, optimizer), (other, _) = boosted(booster), boosted(booster)
    with Monitor(model, optimizer) as monitor:
        other(own_index())
        booster.backward(model(own_index()).square().mean(), optimizer)
        optimizer.step()
    assert monitor.record["experts"]["experts"]["tokens"] == [5, 3, 3, 4]


@pytest.mark.parametrize("plugin", ["ddp", "ep 2"])
@distributed(2)
def test_a_copy_of_the_model_does_not_count(plugin):
    booster = Booster(plugin=PLUGINS[plugin][1]())
    model, optimizer = boosted(booster)
    with Monitor(model, optimizer) as monitor:
        copied = copy.deepcopy(model.unwrap())
        copied.train()(own_index())
        booster.backward(model(own_index()).square().mean(), optimizer)
        optimizer.step()
    assert monitor.record["experts"]["experts"]["tokens"] == [5, 3, 3, 4]


@distributed(2)
def test_a_record_needs_two_collectives_and_one_rank_none():
    booster = Booster(plugin=PLUGINS["ddp"][1]())
    model, optimizer = boosted(booster)
    calls = []
    for across_ranks in (True, False):
        with Monitor(model, optimizer, across_ranks=across_ranks) as monitor:
            booster.backward(model(own_index()).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            calls.append((monitor._count.calls["all_gather"], monitor._count.calls["all_reduce"]))
    assert calls[0][0] == calls[1][0] + 1
    assert calls[0][1] == calls[1][1] + 1


def test_without_the_other_ranks_a_record_is_of_one_rank():
    whole = train_alone("mixtral")
    first, second = run_ranks(train, 2, "mixtral", "ep 2", False)
    for layer, load in whole.items():
        pairs = zip(first[layer]["tokens"], second[layer]["tokens"], strict=True)
        assert [sum(pair) for pair in pairs] == load["tokens"]
        assert first[layer]["tokens"] != load["tokens"]
