"""What benchmarks/gpu_suite.py measures: a list of cases, each a boosted loop beside plain torch.

A new plugin or precision adds its line to CASES; nothing else changes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _engine import Engine, Step
from _gpt import SIZES, GPTSize, batches, make_gpt, next_token_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["CASES", "Case", "case_named"]

_MAX_NORM = 1.0
_LOSS_SCALE = 2.0**12  # low enough that no step overflows: a skipped step would be a cheap one

# Builds a step for a size on a device.
SizedBuild = Callable[[GPTSize, torch.device], Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison.

    Attributes:
        name: How tables and files call it.
        plain: The training loop in plain torch.
        boosted: The same through the booster.
        is_distributed: It needs a process group, here one of a single rank.
        largest: Name of the largest size that it trains; None: that of the run.
    """

    name: str
    plain: SizedBuild
    boosted: SizedBuild
    is_distributed: bool = False
    largest: str | None = None

    def size(self, of_run: GPTSize) -> GPTSize:
        """Returns what it trains in a run of that size."""
        if self.largest is None:
            return of_run
        return min(of_run, SIZES[self.largest], key=lambda size: size.num_matmul_parameters)

    def engines(self, size: GPTSize, device: torch.device) -> list[Engine]:
        """Returns the two engines, plain torch first."""
        return [
            Engine(name="plain torch", build=partial(self.plain, size, device)),
            Engine(name="booster", build=partial(self.boosted, size, device), requires=("booster",)),
        ]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)


def _plain(size: GPTSize, device: torch.device, *, autocast: torch.dtype | None = None, ddp: bool = False) -> Step:
    """fp32 weights; autocast, and a gradient scaler with fp16."""
    model: nn.Module = make_gpt(size, device)
    if ddp:
        model = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])
    optimizer, batch = _adamw(model.parameters()), batches(size, device=device)
    scaler = torch.amp.GradScaler(device.type, _LOSS_SCALE, enabled=autocast is torch.float16)

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = next_token_loss(model(tokens), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _plain_half(
    size: GPTSize, device: torch.device, *, dtype: torch.dtype = torch.float16, scale: float = _LOSS_SCALE
) -> Step:
    """Half-precision weights with fp32 copies that the optimizer updates, and a constant loss scale."""
    model, batch = make_gpt(size, device), batches(size, device=device)
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    model.to(dtype)
    working, optimizer = list(model.parameters()), _adamw(masters)

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        loss = next_token_loss(model(tokens), targets)
        (loss * scale).backward()
        for master, parameter in zip(masters, working, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        if scale != 1.0:
            torch._foreach_div_([master.grad for master in masters], scale)
        nn.utils.clip_grad_norm_(masters, _MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(working, masters)
        optimizer.zero_grad()
        return loss.detach()

    return step


def _boosted(
    size: GPTSize,
    device: torch.device,
    *,
    plugin: Callable[[], Any] | None = None,
    precision: str | None = None,
    **options: Any,
) -> Step:
    """The loop through the booster; `options` are arguments of the precision's class, whose name `precision` is."""
    import booster as package

    chosen_plugin = None if plugin is None else plugin()
    booster = package.Booster(
        device=device if chosen_plugin is None else None,
        mixed_precision=None if precision is None else getattr(package, precision)(**options),
        plugin=chosen_plugin,
    )
    model, batch = make_gpt(size, device), batches(size, device=device)
    model, optimizer, criterion, _, _ = booster.boost(model, _adamw(model.parameters()), next_token_loss)

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        loss = criterion(model(tokens), targets)
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _plain_saving(size: GPTSize, device: torch.device) -> Step:
    """fp32, and after every step a durable torch.save of model and optimizer."""
    model, batch = make_gpt(size, device), batches(size, device=device)
    optimizer = _adamw(model.parameters())

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "state.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        return loss.detach()

    return step


def _boosted_saving(size: GPTSize, device: torch.device) -> Step:
    """The same by booster.save."""
    import booster as package

    booster = package.Booster(device=device)
    model, batch = make_gpt(size, device), batches(size, device=device)
    model, optimizer, criterion, _, _ = booster.boost(model, _adamw(model.parameters()), next_token_loss)

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        loss = criterion(model(tokens), targets)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            booster.save(Path(folder) / "checkpoint", model=model, optimizer=optimizer)
        return loss.detach()

    return step


def _torch_ddp() -> Any:
    from booster.plugins import TorchDDPPlugin

    return TorchDDPPlugin()


def _low_level_zero(stage: int, precision: str) -> Any:
    from booster.plugins import LowLevelZeroPlugin

    return LowLevelZeroPlugin(stage=stage, precision=precision, initial_scale=_LOSS_SCALE)


def _zero_case(stage: int, precision: str, plain: SizedBuild) -> Case:
    """One rank has nothing to send: what is left is the cost of flat buffers, and of fp32 masters in them."""
    boosted = partial(_boosted, plugin=partial(_low_level_zero, stage, precision))
    return Case(name=f"low_level_zero {stage} {precision}", plain=plain, boosted=boosted, is_distributed=True)


CASES: Sequence[Case] = (
    Case(name="fp32", plain=_plain, boosted=_boosted),
    Case(
        name="bf16",
        plain=partial(_plain, autocast=torch.bfloat16),
        boosted=partial(_boosted, precision="BF16MixedPrecision"),
    ),
    Case(
        name="torch_ddp bf16",
        plain=partial(_plain, autocast=torch.bfloat16, ddp=True),
        boosted=partial(_boosted, precision="BF16MixedPrecision", plugin=_torch_ddp),
        is_distributed=True,
    ),
    Case(
        name="fp16",
        plain=partial(_plain, autocast=torch.float16),
        boosted=partial(_boosted, precision="FP16TorchMixedPrecision", init_scale=_LOSS_SCALE),
    ),
    Case(
        name="fp16_naive",
        plain=_plain_half,
        boosted=partial(_boosted, precision="FP16NaiveMixedPrecision", initial_scale=_LOSS_SCALE),
    ),
    Case(
        name="fp16_apex O1",
        plain=partial(_plain, autocast=torch.float16),
        boosted=partial(_boosted, precision="FP16ApexMixedPrecision", opt_level="O1", loss_scale=_LOSS_SCALE),
    ),
    Case(
        name="fp16_apex O2",
        plain=_plain_half,
        boosted=partial(_boosted, precision="FP16ApexMixedPrecision", opt_level="O2", loss_scale=_LOSS_SCALE),
    ),
    Case(
        name="fp8",  # torch has no float8 loop of its own: beside bf16
        plain=partial(_plain, autocast=torch.bfloat16),
        boosted=partial(_boosted, precision="FP8MixedPrecision"),
    ),
    _zero_case(1, "fp32", _plain),
    _zero_case(1, "bf16", partial(_plain_half, dtype=torch.bfloat16, scale=1.0)),
    _zero_case(2, "bf16", partial(_plain_half, dtype=torch.bfloat16, scale=1.0)),
    _zero_case(2, "fp16", _plain_half),
    Case(name="fp32, a checkpoint per step", plain=_plain_saving, boosted=_boosted_saving, largest="50m"),
)


def case_named(name: str) -> Case:
    """Returns the case of that name."""
    return next(case for case in CASES if case.name == name)
