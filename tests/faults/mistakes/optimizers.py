"""Optimizers and schedules of learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faults.mistakes.models import pair
from faults.mistakes.wrong_call import CallSite, WrongCall, call_text

from booster import lr_scheduler, optim

WORLD_SIZE = 2

_OPTIMIZERS: dict[Any, list[dict[str, Any]]] = {
    optim.HybridAdam: [
        {"lr": -1},
        {"lr": "0.1"},
        {"lr": None},
        {"betas": (0.9, 1.0)},
        {"betas": 0.9},
        {"eps": -1e-8},
        {"weight_decay": float("inf")},
        {"bias_correction": 0.9},
        {"adamw_mode": "yes"},
        {"nvme_offload_fraction": 2},
        {"nvme_offload_fraction": 0.5, "nvme_offload_dir": 3},
        {"nvme_offload_dir": "offload"},
    ],
    optim.CPUAdam: [{"lr": float("nan")}, {"nvme_offload_fraction": "half"}],
    optim.FusedAdam: [{"lr": -0.1}, {"betas": (0.9, 0.99, 0.999)}, {"set_grad_none": False}],
    optim.FusedSGD: [{"momentum": -0.9}, {"nesterov": True}, {"wd_after_momentum": 1}],
    optim.FusedLAMB: [{"amsgrad": True}, {"max_grad_norm": "1"}, {"set_grad_none": None}],
    optim.Lamb: [{"eps": "small"}, {"adam": 1}, {"bias_correction": False}],
    optim.Lars: [{"eeta": -1}, {"momentum": 2}],
    optim.Adafactor: [{"lr": 0.1}, {"decay_rate": 0.8}, {"eps": 1e-30}, {"relative_step": False, "warmup_init": True}],
    optim.CAME: [{"lr": None}, {"betas": (0.9, 0.999)}, {"clip_threshold": 0}],
    optim.Muon: [
        {"ns_coefficients": 3},
        {"ns_steps": 0},
        {"ns_dtype": "fp32"},
        {"adjust_lr_fn": "adamw"},
        {"momentum": 1.5},
        {"use_muon": 0},
    ],
}
_SCHEDULES: dict[Any, list[dict[str, Any]]] = {
    lr_scheduler.CosineAnnealingLR: [{"total_steps": 0}, {"total_steps": 0.5}, {"total_steps": 10, "eta_min": 9.0}],
    lr_scheduler.CosineAnnealingWarmupLR: [
        {"total_steps": 10, "warmup_steps": 10},
        {"total_steps": 10, "warmup_steps": 0.1},
        {"total_steps": 10, "warmup_steps": -1},
    ],
    lr_scheduler.ExponentialLR: [{"total_steps": 10, "gamma": 0}, {"total_steps": 10, "last_epoch": 4}],
    lr_scheduler.StepLR: [{"total_steps": 10, "step_size": 0}, {"total_steps": "10"}],
    lr_scheduler.FlatAnnealingLR: [{"total_steps": 10, "pct_start": 1.0}],
    lr_scheduler.FlatAnnealingWarmupLR: [{"total_steps": 10, "warmup_steps": 12}],
    lr_scheduler.LambdaLR: [{"total_steps": 10}, {"total_steps": 10, "lr_lambda": 3}],
    lr_scheduler.MultiplicativeLR: [{"total_steps": 10, "lr_lambda": [abs, abs]}],
    lr_scheduler.LinearWarmupLR: [{"total_steps": None}],
    lr_scheduler.MultiStepLR: [{"total_steps": 10, "milestones": [8, 2]}, {"total_steps": 10, "milestones": 3}],
    lr_scheduler.MultiStepWarmupLR: [{"total_steps": 10, "warmup_steps": "2"}],
    lr_scheduler.OneCycleLR: [{"total_steps": 10, "anneal_strategy": "cosine"}, {"total_steps": 10, "div_factor": 0}],
    lr_scheduler.PolynomialLR: [{"total_steps": 10, "power": -1}, {"total_steps": 10, "end_lr": "small"}],
    lr_scheduler.PolynomialWarmupLR: [{"total_steps": 10, "warmup_steps": 1.5}],
}


def _optimizer(kind: Any, arguments: dict[str, Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        model, _optimizer = pair()
        return lambda: kind(model.parameters(), **arguments)

    return WrongCall(name=call_text(kind, **arguments), prepare=prepare)


def _schedule(kind: Any, arguments: dict[str, Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        optimizer = pair()[1]
        return lambda: kind(optimizer, **arguments)

    return WrongCall(name=call_text(kind, **arguments), prepare=prepare)


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    made = [_optimizer(kind, arguments) for kind, table in _OPTIMIZERS.items() for arguments in table]
    made += [_schedule(kind, arguments) for kind, table in _SCHEDULES.items() for arguments in table]
    return [*made, _schedule_of_a_model()]


def _schedule_of_a_model() -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        model = pair()[0]
        return lambda: lr_scheduler.CosineAnnealingLR(model, 10)  # type: ignore[arg-type]

    return WrongCall(name="CosineAnnealingLR(model, 10)", prepare=prepare)
