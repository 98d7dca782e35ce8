"""The training loops that benchmarks/facade/run.py compares: by hand, through the booster, through its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _harness.gpt import SIZES, batches, make_gpt, next_token_loss
from _harness.pair import Engine, Step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["BOOSTER", "DDP_PLUGIN", "PLUGINS", "RAW", "RAW_DDP", "ddp_engines", "loop_engines", "plugin_engines"]

RAW = "torch"
BOOSTER = "booster"
RAW_DDP = "torch DDP"
DDP_PLUGIN = "TorchDDPPlugin"
# Class and arguments of every plugin, all in fp32.
PLUGINS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    DDP_PLUGIN: ("TorchDDPPlugin", {}),
    "LowLevelZeroPlugin, stage 1": ("LowLevelZeroPlugin", {"stage": 1, "precision": "fp32"}),
    "LowLevelZeroPlugin, stage 2": ("LowLevelZeroPlugin", {"stage": 2, "precision": "fp32"}),
    "GeminiPlugin": ("GeminiPlugin", {"precision": "fp32"}),
    "TorchFSDPPlugin": ("TorchFSDPPlugin", {}),
    "HybridParallelPlugin": ("HybridParallelPlugin", {"precision": "fp32"}),
    "HybridParallelPlugin, ZeRO 1": ("HybridParallelPlugin", {"zero_stage": 1, "precision": "fp32"}),
}

_TINY_WIDTH = 32
_TINY_LAYERS = 8
_TINY_SAMPLES = 8
_MAX_NORM = 1.0

Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
Task = tuple[nn.Module, Batch, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


def loop_engines(clips: bool) -> list[Engine]:
    """Returns one process's plain loop in all variants, raw torch first."""
    return [
        Engine(name=RAW, build=partial(_build_raw, "tiny", clips, False)),
        Engine(name=BOOSTER, build=partial(_build_boosted, "tiny", clips, None), requires=("booster",)),
        Engine(
            name="accelerate",
            build=partial(_build_accelerate, clips),
            requires=("accelerate",),
            is_optional=True,
        ),
        Engine(
            name="fabric",
            build=partial(_build_fabric, clips),
            requires=("lightning.fabric",),
            is_optional=True,
        ),
    ]


def ddp_engines(size: str) -> list[Engine]:
    """Returns data-parallel training in torch's own way first, and by the plugin."""
    return [_raw_ddp(size), _plugin_engine(size, DDP_PLUGIN)]


def plugin_engines(size: str) -> list[Engine]:
    """Returns data-parallel training in torch's own way first, and by every plugin."""
    return [_raw_ddp(size), *(_plugin_engine(size, name) for name in PLUGINS)]


def _raw_ddp(size: str) -> Engine:
    return Engine(name=RAW_DDP, build=partial(_build_raw, size, True, True))


def _plugin_engine(size: str, name: str) -> Engine:
    return Engine(name=name, build=partial(_build_boosted, size, True, name), requires=("booster",))


def _task(size: str) -> Task:
    """Returns a model, its data and its loss, the same ones at every call."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if size == "tiny":
        return _tiny_model(), _tiny_batches(rank), nn.functional.mse_loss
    shape = SIZES[size]
    return make_gpt(shape), batches(shape, rank, world_size), next_token_loss


def _tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*_tiny_layers(), nn.Linear(_TINY_WIDTH, 1))


def _tiny_layers() -> Iterator[nn.Module]:
    for _ in range(_TINY_LAYERS - 1):
        yield nn.Linear(_TINY_WIDTH, _TINY_WIDTH)
        yield nn.ReLU()


def _tiny_batches(rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn(8, _TINY_SAMPLES, _TINY_WIDTH, generator=generator)
    targets = torch.randn(8, _TINY_SAMPLES, 1, generator=generator)
    return lambda index: (inputs[index % 8], targets[index % 8])


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)


def _build_raw(size: str, clips: bool, is_distributed: bool) -> Step:
    model, batch, criterion = _task(size)
    model = DistributedDataParallel(model) if is_distributed else model
    optimizer = _adamw(model)

    def step(index: int) -> torch.Tensor:
        inputs, targets = batch(index)
        loss = criterion(model(inputs), targets)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _build_boosted(size: str, clips: bool, plugin: str | None) -> Step:
    from booster import Booster, plugins

    model, batch, criterion = _task(size)
    if plugin is None:
        booster = Booster()
    else:
        class_name, arguments = PLUGINS[plugin]
        booster = Booster(plugin=getattr(plugins, class_name)(**arguments))
    model, optimizer, criterion, _, _ = booster.boost(model, _adamw(model), criterion)

    def step(index: int) -> torch.Tensor:
        inputs, targets = batch(index)
        loss = criterion(model(inputs), targets)
        booster.backward(loss, optimizer)
        if clips:
            booster.clip_grad_norm_(optimizer, _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _build_accelerate(clips: bool) -> Step:
    from accelerate import Accelerator

    model, batch, criterion = _task("tiny")
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, _adamw(model))

    def step(index: int) -> torch.Tensor:
        inputs, targets = batch(index)
        loss = criterion(model(inputs), targets)
        accelerator.backward(loss)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _build_fabric(clips: bool) -> Step:
    from lightning.fabric import Fabric

    model, batch, criterion = _task("tiny")
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(model, _adamw(model))

    def step(index: int) -> torch.Tensor:
        inputs, targets = batch(index)
        loss = criterion(model(inputs), targets)
        fabric.backward(loss)
        if clips:
            fabric.clip_gradients(model, optimizer, max_norm=_MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
