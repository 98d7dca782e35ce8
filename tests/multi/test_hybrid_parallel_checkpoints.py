"""HybridParallelPlugin: saves are those of the user's model, whatever ranks share it.

Pairs with all other plugins are in test_any_to_any.py, runs that stop and start again in test_resume_sharded.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload, run_ranks
from hybrid_cases import LAYOUTS, ON_OWN_AXIS, OWN_ATTENTION
from oracles.joined_slices import copied_slices, gathered_over_ranks, join_slices, joined_over_ranks
from oracles.serial_training import make_optimizer, train_serial
from parity import EXACT, _assert_same_move
from safetensors.torch import load_file
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model, split_batch

from booster import Booster
from booster.lazy_init import LazyInitContext
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.pytree import map_tensors

preload(*TRANSFORMERS_MODULES)

pytestmark = pytest.mark.on_device

ODD_VOCABULARY = 99  # padded to 128 in memory


def make_plugin(arguments):
    return HybridParallelPlugin(**{"precision": "fp32", "zero_bucket_size_in_m": 0.004, **arguments})


def make_booster(arguments):
    return Booster(plugin=make_plugin(arguments))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01, eps=1e-3)


def train(name: str, arguments: dict, path: str, steps: int = 2):
    """Saves a trained model; returns the logical weights and states."""
    entry, booster = get_model(name), make_booster(arguments)
    raw = entry.build()
    model, optimizer, *_ = booster.boost(raw, optimizer_of(raw))
    for step in range(steps):
        one_step(booster, entry, model, optimizer, step)
    booster.save_model(model, Path(path) / "model", shard=True, size_per_shard=1)
    booster.save_optimizer(optimizer, Path(path) / "optimizer", shard=True)
    return joined_over_ranks(model), whole_states(optimizer)


def one_step(booster, entry, model, optimizer, step):
    # The same for all: data are not divided here.
    batch = map_tensors(lambda tensor: tensor.to(booster.device), entry.make_batch(step, 2))
    booster.backward(entry.loss(model, batch), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def whole_states(optimizer) -> dict[str, torch.Tensor]:
    return join_slices(gathered_over_ranks(copied_slices(optimizer.checkpoint_state().slices())))


MODELS = ["llama", "gpt2", "bert", "t5", "gemma", "falcon_groups", "mixtral", "whisper", "user_transformer"]


SLOW_MODELS = ("bert", "gemma", "whisper")  # like gpt2, llama and t5


@pytest.mark.parametrize(
    "model", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW_MODELS else one for one in MODELS]
)
def test_a_save_has_the_tensors_of_the_users_model(tmp_path, model):
    weights, states = run_ranks(train, 2, model, {"tp_size": 2}, str(tmp_path), timeout=120)[0]
    plain = get_model(model).build().state_dict()
    assert weights.keys() == plain.keys()
    stored = {}
    for file in sorted((tmp_path / "model").glob("*.safetensors")):
        stored |= load_file(file)
    assert set(stored) <= set(plain)
    for name, tensor in stored.items():
        assert tensor.shape == plain[name].shape, name  # no padding, no parts
        assert torch.equal(tensor, weights[name]), name
    assert {name for name in plain if name not in stored} <= {name for tie in get_model(model).tied for name in tie}
    for name, tensor in states.items():
        parameter = name.rsplit(".", 1)[0]
        assert tensor.shape in (plain[parameter].shape, ()), name


FAMILIES = [
    "llama",
    "qwen3",
    "mistral",
    "gemma",
    "phi",
    "mixtral",
    "gpt2",
    "bert",
    "opt",
    "t5",
    "vit",
    "bloom",
    "falcon",
]


def open_in_transformers(model: str, path: Path) -> nn.Module:
    return type(get_model(model).build()).from_pretrained(path)


@pytest.mark.parametrize("model", ["llama", "gpt2", "t5", "gemma"])
def test_a_save_opens_in_transformers(tmp_path, model):
    weights, _ = run_ranks(train, 2, model, {"tp_size": 2}, str(tmp_path), timeout=120)[0]
    found = open_in_transformers(model, tmp_path / "model")
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


# Without those that boost or the first batch refuses: sequences on an axis of their own need an attention that can be
# exchanged.
GRID = [
    (layout, model)
    for layout in LAYOUTS
    for model in FAMILIES
    if not (model in OWN_ATTENTION and layout in ON_OWN_AXIS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model"), GRID)
def test_every_familys_save_opens_in_transformers(tmp_path, model, layout):
    world_size, arguments = LAYOUTS[layout]
    weights, _ = run_ranks(train, world_size, model, arguments, str(tmp_path), timeout=120)[0]
    found = open_in_transformers(model, tmp_path / "model")
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("layout", ["tp 2", "split_gather 2", "all_to_all 2"])
def test_pretrained_weights_arrive_in_parts(tmp_path, layout, is_lazy):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        pretrained = get_model("llama").construct()
    pretrained.save_pretrained(tmp_path / "model", max_shard_size="4KB")
    expected = {name: tensor.clone() for name, tensor in pretrained.state_dict().items()}
    for found in run_ranks(load_pretrained, 2, LAYOUTS[layout][1], str(tmp_path / "model"), is_lazy):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def load_pretrained(arguments, path, is_lazy):
    booster = make_booster(arguments)
    with LazyInitContext() if is_lazy else nullcontext():
        raw = get_model("llama").construct()
    model, *_ = booster.boost(raw)
    booster.load_model(model, path)
    return joined_over_ranks(model)


def torch_ddp():
    return TorchDDPPlugin()


def gemini():
    return GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 512})


def zero_2():
    return LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=0.004)


# A run that continues under another plugin after every step: ranks, and the plugin or the arguments of ours.
JOURNEY = [
    (2, {"tp_size": 2}),
    (1, torch_ddp),
    (4, gemini),
    (4, {"tp_size": 4}),
    (4, {**LAYOUTS["all_to_all 2"][1], "zero_stage": 2}),
    (2, LAYOUTS["split_gather 2"][1]),
    (3, {"tp_size": 3}),
    (2, zero_2),
    (4, {"tp_size": 2, "zero_stage": 1}),
    (2, {**LAYOUTS["ring_attn 2"][1], "zero_stage": 1}),
    (2, {"tp_size": 2, "make_vocab_size_divisible_by": 1}),
]
SAMPLES = 4


def one_stage(name: str, given, step: int, path: str):
    entry = get_model(name)
    plugin = given() if callable(given) else make_plugin(given)
    booster, raw = Booster(plugin=plugin), entry.build()
    model, optimizer, *_ = booster.boost(raw, make_optimizer("adamw", entry.param_groups(raw)))
    if step > 0:
        booster.load(Path(path) / f"{step - 1}", model, optimizer)
    batch = split_batch(entry.make_batch(step, SAMPLES), plugin.dp_rank, plugin.dp_size)
    batch = map_tensors(lambda tensor: tensor.to(booster.device), batch)
    booster.backward(entry.loss(model, batch), optimizer)
    optimizer.step()
    booster.save(Path(path) / f"{step}", model, optimizer)
    return joined_over_ranks(model) if isinstance(plugin, HybridParallelPlugin) else None


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
@pytest.mark.slow
def test_a_run_that_changes_its_layout_at_every_step_is_that_of_one_process(tmp_path, model):
    found = None
    for step, (world_size, given) in enumerate(JOURNEY):
        found = run_ranks(one_stage, world_size, model, given, step, str(tmp_path))[0]
    entry = get_model(model)
    serial = train_serial(
        entry,
        precision=None,
        steps=len(JOURNEY),
        batch_size=SAMPLES,
        accumulation=1,
        parts=1,
        max_norm=float("inf"),
        optimizer="adamw",
    )
    _assert_same_move(found, serial.weights, entry.build().state_dict(), EXACT.update, f"the journey of {model}")


@distributed(world_size=2)
def test_padding_stays_zero_through_training_and_loading(tmp_path):
    entry, booster = get_model("llama"), make_booster({"tp_size": 2})
    raw = entry.build()
    model, optimizer, *_ = booster.boost(raw, optimizer_of(raw))
    for step in range(2):
        one_step(booster, entry, model, optimizer, step)
    head = booster.unwrap_model(model).lm_head.weight
    assert head.shape[0] == 64
    rows = 64 if dist.get_rank() == 0 else ODD_VOCABULARY - 64
    assert not head[rows:].any()
    booster.save_model(model, tmp_path / "c", shard=True)
    with torch.no_grad():
        head[:rows].add_(1)
    booster.load_model(model, tmp_path / "c")
    assert not head[rows:].any()
    assert head[:rows].any(dim=1).all()


@distributed(world_size=2)
def test_a_state_dict_of_a_rank_loads_again():
    entry, booster = get_model("gpt2"), make_booster({"tp_size": 2})
    raw = entry.build()
    model, optimizer, *_ = booster.boost(raw, optimizer_of(raw))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one_step(booster, entry, model, optimizer, 0)
    model.load_state_dict(before)
    after = joined_over_ranks(model)
    expected = entry.build().state_dict()
    assert all(torch.equal(after[name], expected[name]) for name in expected)
