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
from _harness.engine import Engine, Step
from _harness.gpt import MAX_NORM, SIZES, GPTSize, batches, boosted_step, make_gpt, next_token_loss, plain_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero.fsdp import plugin_of
from zero.manual import FULL_SHARD, SHARD_GRAD_OP, STRATEGIES, policy_of, shard_manual

__all__ = ["CASES", "Case", "SizedBuild", "boosted", "case_named", "gemini", "plain_half"]

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


def _hybrid_adam(parameters: Any) -> torch.optim.Optimizer:
    from booster.optim import HybridAdam

    return HybridAdam(parameters, lr=1e-4, weight_decay=0.01)


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
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain_half(
    size: GPTSize, device: torch.device, *, dtype: torch.dtype = torch.float16, scale: float = _LOSS_SCALE
) -> Step:
    """Returns a step with half-precision weights, fp32 copies that the optimizer updates, and a constant loss scale."""
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
        nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(working, masters)
        optimizer.zero_grad()
        return loss.detach()

    return step


def boosted(
    size: GPTSize,
    device: torch.device,
    *,
    plugin: Callable[[], Any] | None = None,
    precision: str | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw,
    model: nn.Module | None = None,
    **options: Any,
) -> Step:
    """Returns a step of the loop through the booster.

    Args:
        size: Of the model and the batch.
        device: To train on.
        plugin: Makes the plugin; None: there is none.
        precision: Name of a class of the package; None: that of the plugin, or fp32.
        make_optimizer: From the parameters.
        model: To train, maybe lazy; None: the GPT of that size, on the device.
        **options: Arguments of the precision's class.
    """
    import booster as package

    chosen_plugin = None if plugin is None else plugin()
    booster = package.Booster(
        device=device if chosen_plugin is None else None,
        mixed_precision=None if precision is None else getattr(package, precision)(**options),
        plugin=chosen_plugin,
    )
    model, batch = make_gpt(size, device) if model is None else model, batches(size, device=device)
    return boosted_step(booster, model, make_optimizer(model.parameters()), batch)


def _fsdp_manual(size: GPTSize, device: torch.device, *, strategy: str, precision: str) -> Step:
    """FSDP2 without the booster, with the plugin's units and policy."""
    model, batch = make_gpt(size, device), batches(size, device=device)
    reshards = STRATEGIES[strategy]
    shard_manual(model, policy_of(precision), reshard_after_forward=reshards, device_type=device.type)
    optimizer = _adamw(model.parameters())
    return plain_step(model, optimizer, batch)


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


def gemini(precision: str, **arguments: Any) -> Any:
    """Returns a GeminiPlugin with these arguments."""
    from booster.plugins import GeminiPlugin

    return GeminiPlugin(precision=precision, **arguments)


def _gemini_case(name: str, precision: str, plain: SizedBuild, **arguments: Any) -> Case:
    """Models that fit in any case: what is shown is the cost of the placement, beside plain torch."""
    build = partial(boosted, plugin=partial(gemini, precision, **arguments), make_optimizer=_hybrid_adam)
    return Case(name=f"gemini {name} {precision}", plain=plain, boosted=build, is_distributed=True)


def _zero_case(stage: int, precision: str, plain: SizedBuild) -> Case:
    """One rank has nothing to send: what is left is the cost of flat buffers, and of fp32 masters in them."""
    build = partial(boosted, plugin=partial(_low_level_zero, stage, precision))
    return Case(name=f"low_level_zero {stage} {precision}", plain=plain, boosted=build, is_distributed=True)


def _fsdp_case(strategy: str, precision: str) -> Case:
    """Beside FSDP2 by hand: what is shown is the cost of the wrapper."""
    plain = partial(_fsdp_manual, strategy=strategy, precision=precision)
    build = partial(boosted, plugin=partial(plugin_of, strategy, precision))
    return Case(name=f"torch_fsdp {strategy} {precision}", plain=plain, boosted=build, is_distributed=True)


CASES: Sequence[Case] = (
    Case(name="fp32", plain=_plain, boosted=boosted),
    Case(
        name="bf16",
        plain=partial(_plain, autocast=torch.bfloat16),
        boosted=partial(boosted, precision="BF16MixedPrecision"),
    ),
    Case(
        name="torch_ddp bf16",
        plain=partial(_plain, autocast=torch.bfloat16, ddp=True),
        boosted=partial(boosted, precision="BF16MixedPrecision", plugin=_torch_ddp),
        is_distributed=True,
    ),
    Case(
        name="fp16",
        plain=partial(_plain, autocast=torch.float16),
        boosted=partial(boosted, precision="FP16TorchMixedPrecision", init_scale=_LOSS_SCALE),
    ),
    Case(
        name="fp16_naive",
        plain=plain_half,
        boosted=partial(boosted, precision="FP16NaiveMixedPrecision", initial_scale=_LOSS_SCALE),
    ),
    Case(
        name="fp16_apex O1",
        plain=partial(_plain, autocast=torch.float16),
        boosted=partial(boosted, precision="FP16ApexMixedPrecision", opt_level="O1", loss_scale=_LOSS_SCALE),
    ),
    Case(
        name="fp16_apex O2",
        plain=plain_half,
        boosted=partial(boosted, precision="FP16ApexMixedPrecision", opt_level="O2", loss_scale=_LOSS_SCALE),
    ),
    Case(
        name="fp8",  # torch has no float8 loop of its own: beside bf16
        plain=partial(_plain, autocast=torch.bfloat16),
        boosted=partial(boosted, precision="FP8MixedPrecision"),
    ),
    _zero_case(1, "fp32", _plain),
    _zero_case(1, "bf16", partial(plain_half, dtype=torch.bfloat16, scale=1.0)),
    _zero_case(2, "bf16", partial(plain_half, dtype=torch.bfloat16, scale=1.0)),
    _zero_case(2, "fp16", plain_half),
    _gemini_case("static", "fp32", _plain),
    _gemini_case("static", "bf16", partial(plain_half, dtype=torch.bfloat16, scale=1.0)),
    _gemini_case("auto", "bf16", partial(plain_half, dtype=torch.bfloat16, scale=1.0), placement_policy="auto"),
    _gemini_case("cpu", "bf16", partial(plain_half, dtype=torch.bfloat16, scale=1.0), placement_policy="cpu"),
    _fsdp_case(FULL_SHARD, "fp32"),
    _fsdp_case(FULL_SHARD, "bf16"),
    _fsdp_case(SHARD_GRAD_OP, "bf16"),
    Case(name="fp32, a checkpoint per step", plain=_plain_saving, boosted=_boosted_saving, largest="50m"),
)


def case_named(name: str) -> Case:
    """Returns the case of that name."""
    return next(case for case in CASES if case.name == name)
