"""Saves of ranks that share experts are those of the user's model: any layout loads them, and so does transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, preload, run_ranks
from oracles.joined_slices import copied_slices, gathered_over_ranks, join_slices, joined_over_ranks
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model, split_batch

from booster import Booster
from booster.device import current_device
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.pytree import map_tensors

preload(*TRANSFORMERS_MODULES)

pytestmark = pytest.mark.on_device


def hybrid(**arguments):
    return HybridParallelPlugin(precision="fp32", zero_bucket_size_in_m=0.004, ddp_bucket_cap_mb=0.004, **arguments)


# Ranks and the plugin.
LAYOUTS = {
    "ep 2": (2, lambda: hybrid(ep_size=2)),
    "ep 2 zero 1": (2, lambda: hybrid(ep_size=2, zero_stage=1)),
    "ep 2 zero 2": (2, lambda: hybrid(ep_size=2, zero_stage=2)),
    "ep 2 dp 2": (4, lambda: hybrid(ep_size=2)),
    "ep 2 dp 2 zero 1": (4, lambda: hybrid(ep_size=2, zero_stage=1)),
    "ep 4 zero 1": (4, lambda: hybrid(ep_size=4, zero_stage=1)),
    "ep 2 tp 2": (4, lambda: hybrid(ep_size=2, tp_size=2)),
    "ep 2 tp 2 zero 1": (4, lambda: hybrid(ep_size=2, tp_size=2, zero_stage=1)),
    "ep 3": (3, lambda: hybrid(ep_size=3)),
    "ddp": (2, lambda: TorchDDPPlugin(find_unused_parameters=True)),
    "zero 1": (2, lambda: LowLevelZeroPlugin(stage=1, precision="fp32")),
    "gemini": (2, lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=1e-3, search_range_m=1e-3)),
    "fsdp": (2, TorchFSDPPlugin),
    "tp 2": (2, lambda: hybrid(tp_size=2)),
}
SHARING = [name for name in LAYOUTS if name.startswith("ep")]
LISTED = [name for name in LAYOUTS if "tp" not in name and name != "ep 3"]  # no plan to cut what a model's lists hold


def boosted(name: str, layout: str, *, seed: int | None = None):
    booster, entry = Booster(plugin=LAYOUTS[layout][1]()), get_model(name)
    raw = entry.build()
    if seed is not None:  # other weights, which a load has to replace
        torch.manual_seed(seed)
        raw = entry.construct()
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=0.01, eps=1e-3))
    return booster, model, optimizer


def train(booster: Booster, name: str, model: nn.Module, optimizer, steps: range) -> list[float]:
    entry, plugin = get_model(name), booster.plugin
    rank, size = getattr(plugin, "dp_rank", dist.get_rank()), getattr(plugin, "dp_size", dist.get_world_size())
    losses = []
    for step in steps:
        batch = split_batch(entry.make_batch(step, 12), rank, size)
        loss = entry.loss(model, map_tensors(lambda one: one.to(current_device()), batch))
        losses.append(loss.item())
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def states_of(optimizer) -> dict[str, torch.Tensor]:
    return join_slices(gathered_over_ranks(copied_slices(optimizer.checkpoint_state().slices())))


def save(name: str, layout: str, path: str):
    booster, model, optimizer = boosted(name, layout)
    train(booster, name, model, optimizer, range(2))
    booster.save_model(model, Path(path) / "model", shard=True, size_per_shard=1)
    booster.save_optimizer(optimizer, Path(path) / "optimizer", shard=True)
    return joined_over_ranks(model), states_of(optimizer)


def load(name: str, layout: str, path: str):
    booster, model, optimizer = boosted(name, layout, seed=5)
    booster.load_model(model, Path(path) / "model")
    booster.load_optimizer(optimizer, Path(path) / "optimizer")
    loaded = joined_over_ranks(model), states_of(optimizer)
    losses = train(booster, name, model, optimizer, range(2, 4))
    return *loaded, losses, joined_over_ranks(model)


def train_alone(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    entry = get_model(name)
    model = entry.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = []
    for step in range(4):
        loss = entry.loss(model, entry.make_batch(step, 12))
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


PAIRS = [
    ("mixtral", saved, loaded)
    for number, saved in enumerate(LAYOUTS)
    for place, loaded in enumerate(LAYOUTS)
    if (saved in SHARING or loaded in SHARING) and (number + place) % 2
]
PAIRS += [("switch", saved, loaded) for saved in LISTED for loaded in LISTED if saved in SHARING or loaded in SHARING][
    ::3
]


@pytest.mark.parametrize(("name", "saved", "loaded"), PAIRS)
def test_every_layout_loads_what_another_saved(tmp_path, name, saved, loaded):
    weights, states = run_ranks(save, LAYOUTS[saved][0], name, saved, str(tmp_path), timeout=120)[0]
    results = run_ranks(load, LAYOUTS[loaded][0], name, loaded, str(tmp_path), timeout=120)
    found_weights, found_states, _, last = results[0]
    for key, tensor in found_weights.items():
        assert torch.equal(tensor, weights[key]), key
    for key in found_states.keys() & states.keys():
        assert torch.equal(found_states[key], states[key]), key
    assert {key for key in states if not key.endswith(".step")} <= found_states.keys()
    expected_losses, expected = train_alone(name)
    is_tensor_parallel = "tp" in loaded
    per_rank = [result[2] for result in results[:: 2 if is_tensor_parallel else 1]]
    for number in range(2):
        mean = sum(losses[number] for losses in per_rank) / len(per_rank)
        assert mean == pytest.approx(expected_losses[2 + number], rel=1e-5)
    for key, tensor in last.items():
        if key in expected:
            torch.testing.assert_close(tensor, expected[key].detach(), rtol=1e-4, atol=2e-5)


def accumulate(booster: Booster, name: str, model: nn.Module, optimizer, steps: range) -> None:
    """Trains with microbatches, three of which make a step."""
    entry, plugin = get_model(name), booster.plugin
    rank, size = getattr(plugin, "dp_rank", dist.get_rank()), getattr(plugin, "dp_size", dist.get_world_size())
    for number in steps:
        batch = split_batch(entry.make_batch(number, 12), rank, size)
        with booster.accumulate(model, optimizer, 3):
            booster.backward(entry.loss(model, map_tensors(lambda one: one.to(current_device()), batch)), optimizer)
            optimizer.step()
            optimizer.zero_grad()


def save_amid(name: str, layout: str, path: str) -> None:
    booster, model, optimizer = boosted(name, layout)
    accumulate(booster, name, model, optimizer, range(2))
    booster.save(path, model, optimizer)


def load_amid(name: str, layout: str, path: str) -> dict[str, torch.Tensor]:
    booster, model, optimizer = boosted(name, layout, seed=5)
    booster.load(path, model, optimizer)
    accumulate(booster, name, model, optimizer, range(2, 3))
    return joined_over_ranks(model)


def accumulate_alone(name: str) -> dict[str, torch.Tensor]:
    entry = get_model(name)
    model = entry.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for number in range(3):
        (entry.loss(model, entry.make_batch(number, 12)) / 3).backward()
    optimizer.step()
    return dict(model.named_parameters())


AMID = ["ep 2", "ep 2 zero 1", "ep 2 zero 2", "ep 2 dp 2", "ep 4 zero 1", "ep 2 tp 2", "ep 3", "ddp", "gemini", "fsdp"]
AMID_PAIRS = [
    (saved, loaded)
    for number, saved in enumerate(AMID)
    for place, loaded in enumerate(AMID)
    if (saved in SHARING or loaded in SHARING) and (number + place) % 2 == 0
]


@pytest.mark.parametrize(("saved", "loaded"), AMID_PAIRS)
def test_every_layout_continues_the_accumulation_of_another(tmp_path, saved, loaded):
    name = "mixtral_6_experts"
    run_ranks(save_amid, LAYOUTS[saved][0], name, saved, str(tmp_path / "c"), timeout=120)
    found = run_ranks(load_amid, LAYOUTS[loaded][0], name, loaded, str(tmp_path / "c"), timeout=120)[0]
    for key, tensor in accumulate_alone(name).items():
        torch.testing.assert_close(found[key], tensor.detach(), rtol=1e-4, atol=2e-5, msg=key)


@pytest.mark.parametrize("layout", SHARING)
def test_a_save_opens_in_transformers(tmp_path, layout):
    weights, _ = run_ranks(save, LAYOUTS[layout][0], "mixtral", layout, str(tmp_path), timeout=120)[0]
    found = type(get_model("mixtral").construct()).from_pretrained(tmp_path / "model")
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def load_files_of_transformers(path: str) -> dict[str, torch.Tensor]:
    booster, model, _ = boosted("mixtral", "ep 2 zero 1", seed=5)
    booster.load_model(model, path)
    return joined_over_ranks(model)


def test_files_of_transformers_load(tmp_path):
    raw = get_model("mixtral").build()
    raw.save_pretrained(tmp_path)  # with a file entry for each expert
    found = run_ranks(load_files_of_transformers, 2, str(tmp_path), timeout=120)[0]
    for name, tensor in raw.state_dict().items():
        assert torch.equal(found[name], tensor), name


def desync(layout: str) -> None:
    arguments = {"ep_size": 2 if dist.get_rank() == 0 else 1}
    hybrid(**arguments)


def test_ranks_with_other_sizes_are_named():
    with pytest.raises(RanksFailed, match=r"DesyncError: .*ep_size"):
        run_ranks(desync, 2, "ep 2")


def boost_other_experts() -> None:
    model = get_model("mixtral" if dist.get_rank() == 0 else "mixtral_6_experts").build()
    Booster(plugin=hybrid(ep_size=2)).boost(model, torch.optim.AdamW(model.parameters()))


def test_ranks_with_other_experts_are_named():
    with pytest.raises(RanksFailed, match=r"DesyncError: .*mlp.gate.weight: \(4, 32\)"):
        run_ranks(boost_other_experts, 2)
