"""GeminiPlugin on a GPU: every policy trains as plain torch, over host and disk. Run by benchmarks/gpu_suite.py."""

from __future__ import annotations

import copy
import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_groups import needs_gpu
from torch import nn

from booster import Booster
from booster.device import memory_allocated
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin

pytestmark = [pytest.mark.gpu, pytest.mark.on_device, needs_gpu, pytest.mark.usefixtures("alone")]

WIDTH, DEPTH = 64, 4
STEPS = 5
STEADY_RATIO = 0.9  # the plugin's default share of the budget after the first step
LOSS_SCALE = 2.0**10  # low enough that no step overflows
CHUNK_NUMEL = 3 * WIDTH * WIDTH // 2  # a layer each
PAYLOAD_BYTES = 4 * 2 * CHUNK_NUMEL  # of two chunks in fp32

POLICIES: dict[str, dict[str, Any]] = {
    "static": {},
    "prefetch": {"max_prefetch": 2, "offload_param_frac": 1.0},
    "kept": {"shard_param_frac": 0.0},
    "strict": {"strict_ddp_mode": True},
    "cuda": {"placement_policy": "cuda"},
    "cpu": {"placement_policy": "cpu"},
    "cpu, pinned": {"placement_policy": "cpu", "pin_memory": True},
    "auto": {"placement_policy": "auto"},
    "auto, little": {"placement_policy": "auto", "device_memory_budget": 4 * 2**20},
    "const": {"placement_policy": "const", "device_memory_budget": 2 * PAYLOAD_BYTES},
    "states offloaded": {"offload_optim_frac": 1.0},
    "half of the states offloaded": {"offload_optim_frac": 0.5},
    "half offloaded": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5},
    "weights offloaded": {"offload_param_frac": 1.0},
    "synchronous": {"enable_async_reduce": False},
}
# The losses of a few steps: fp32 sums in another order, bf16 rounds by 2**-9 and fp16 by 2**-12 per operation.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}


def make_model(width: int = WIDTH, depth: int = DEPTH) -> nn.Module:
    """Returns a model on the host: the plugin brings it to where it belongs."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, width))


def make_batch(index: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    x, y = (torch.randn(32, width, generator=generator).to("cuda") for _ in range(2))
    return x, y


def make_plugin(precision: str, **arguments: Any) -> GeminiPlugin:
    return GeminiPlugin(
        precision=precision,
        initial_scale=LOSS_SCALE,
        force_outputs_fp32=True,
        chunk_config_dict={"chunk_size": CHUNK_NUMEL},
        **arguments,
    )


def make_optimizer(model: nn.Module, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=1e-2, weight_decay=0.01)


def train_plain(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model().to("cuda")
    optimizer, losses = make_optimizer(model, torch.optim.AdamW), []
    for index in range(steps):
        x, y = make_batch(index)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(booster: Booster, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for index in steps:
        x, y = make_batch(index)
        loss = nn.functional.mse_loss(model(x), y)
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def boosted(plugin: GeminiPlugin, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=plugin)
    model = make_model()
    model, optimizer, *_ = booster.boost(model, make_optimizer(model, kind))
    return booster, model, optimizer


def assert_trains_as_plain_torch(plugin: GeminiPlugin, precision: str, kind: type[torch.optim.Optimizer]) -> Any:
    booster, model, optimizer = boosted(plugin, kind)
    losses = train(booster, model, optimizer, range(STEPS))
    expected, weights = train_plain(STEPS)
    assert losses == pytest.approx(expected, rel=TOLERANCES[precision])
    if precision == "fp32":
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                value, weights[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
    return optimizer


def workspace_bytes() -> int:
    """Bytes that stay on the device beside a model: cuBLAS has a workspace for each thread, 32 MiB each on Hopper."""
    layer = nn.Linear(WIDTH, WIDTH).to("cuda")
    layer(torch.ones(1, WIDTH, device="cuda")).sum().backward()
    del layer
    gc.collect()
    return memory_allocated()


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_as_plain_torch(policy: str, precision: str) -> None:
    arguments = dict(POLICIES[policy])
    if arguments.get("placement_policy") == "auto" and "device_memory_budget" in arguments:
        arguments["device_memory_budget"] += math.ceil(workspace_bytes() / STEADY_RATIO)
    assert_trains_as_plain_torch(make_plugin(precision, **arguments), precision, torch.optim.AdamW)


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(
    "arguments", [{"offload_optim_frac": 1.0}, {"offload_optim_frac": 0.5}, {"placement_policy": "cpu"}]
)
def test_states_in_host_memory_are_updated_there(arguments: dict[str, Any], precision: str) -> None:
    optimizer = assert_trains_as_plain_torch(make_plugin(precision, **arguments), precision, HybridAdam)
    kinds = {state["exp_avg"].device.type for state in optimizer.state.values()}
    assert kinds == ({"cpu", "cuda"} if arguments.get("offload_optim_frac") == 0.5 else {"cpu"})


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"placement_policy": "cpu"},
        {"offload_optim_frac": 1.0},
        {"offload_param_frac": 1.0},
        {"offload_optim_frac": 0.5, "offload_param_frac": 0.5},
    ],
)
def test_a_disk_holds_what_is_offloaded(arguments: dict[str, Any], precision: str, tmp_path: Path) -> None:
    plugin = make_plugin(precision, offload_dir=tmp_path, **arguments)
    assert_trains_as_plain_torch(plugin, precision, HybridAdam)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("arguments", [{}, {"placement_policy": "cpu"}])
def test_memory_stays_below_the_formula(arguments: dict[str, Any], precision: str) -> None:
    """On one rank: 16 bytes per weight with everything there, else the payloads; activations are small here."""
    width, depth = 1024, 8
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    chunk_numel = width * (width + 1)
    plugin = GeminiPlugin(precision=precision, chunk_config_dict={"chunk_size": chunk_numel}, **arguments)
    booster, model = Booster(plugin=plugin), make_model(width, depth)
    numel = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-3))
    torch.cuda.reset_peak_memory_stats()
    for index in range(3):
        x, y = make_batch(index, width)
        booster.backward(nn.functional.mse_loss(model(x).float(), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    weight_bytes = 4 if precision == "fp32" else 2
    chunks = 3 * weight_bytes * chunk_numel  # a payload, a gradient buffer, and the gradient that arrives
    states = 0 if arguments else numel * (weight_bytes + 4 + (8 if precision == "fp32" else 12))
    sums = 2 * 4 * chunk_numel  # on their way from and to the host
    updating = 0 if arguments else 4 * 3 * numel  # torch's Adam takes lists of temporaries
    activations = (4 * depth + 8) * 4 * 32 * width + 32 * 2**20  # and cuBLAS's workspace
    assert peak <= states + chunks + sums + updating + activations
    if arguments:
        assert peak < numel * weight_bytes  # not even the weights would fit


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(("saved", "loaded"), [("static", "cpu"), ("cpu", "static"), ("states offloaded", "kept")])
def test_a_checkpoint_goes_on_under_another_policy(saved: str, loaded: str, precision: str, tmp_path: Path) -> None:
    booster, model, optimizer = boosted(make_plugin(precision, **POLICIES[saved]), HybridAdam)
    train(booster, model, optimizer, range(3))
    booster.save_model(model, tmp_path / "model", shard=True)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=True)
    weights = copy.deepcopy(model.state_dict())
    expected = train(booster, model, optimizer, range(3, 6))

    booster, model, optimizer = boosted(make_plugin(precision, **POLICIES[loaded]), HybridAdam)
    booster.load_model(model, tmp_path / "model")
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    # The host's kernel and torch's round their updates at different places.
    found = train(booster, model, optimizer, range(3, 6))
    assert found == pytest.approx(expected, rel=TOLERANCES[precision])


def test_weights_that_are_not_gathered_take_no_memory_on_the_device() -> None:
    booster, model, optimizer = boosted(make_plugin("bf16", placement_policy="cpu"), HybridAdam)
    train(booster, model, optimizer, range(2))
    gc.collect()
    shown = sum(parameter.untyped_storage().nbytes() for parameter in booster.unwrap_model(model).parameters())
    assert shown <= 16 * len(list(model.parameters()))
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())


def test_evaluation_before_and_between_steps() -> None:
    booster, model, optimizer = boosted(make_plugin("fp32", placement_policy="cpu"))
    x, _ = make_batch(99)
    reference = make_model().to("cuda")
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)
    train(booster, model, optimizer, range(2))
    reference.load_state_dict(model.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)
