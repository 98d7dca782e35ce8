"""Trainers, their hooks and gradient handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faults.mistakes.models import batches, boosted
from faults.mistakes.wrong_call import CallSite, WrongCall

from booster import Trainer
from booster.trainer import CheckpointHook, DataParallelGradientHandler, EarlyStopHook, LossHook

WORLD_SIZE = 2

_TRAINERS: dict[str, dict[str, Any]] = {
    "criterion=3": {"criterion": 3},
    "accumulate=0": {"accumulate": 0},
    "max_norm=-1": {"max_norm": -1},
    "hooks=LossHook()": {"hooks": LossHook()},
    "hooks=[LossHook]": {"hooks": [LossHook]},
    "hooks=[object()]": {"hooks": [object()]},
    "hooks=[CheckpointHook('c'), CheckpointHook('c')]": {"hooks": [CheckpointHook("c"), CheckpointHook("c")]},
    "gradient_handlers=['Unknown']": {"gradient_handlers": ["Unknown"]},
}
_FITS: dict[str, dict[str, Any]] = {
    "()": {},
    "(epochs=0)": {"epochs": 0},
    "(epochs=1, steps=1)": {"epochs": 1, "steps": 1},
    "(epochs=1, evaluate_every=2)": {"epochs": 1, "evaluate_every": 2},
    "(epochs=1, eval_loader=3)": {"epochs": 1, "eval_loader": 3},
    "(epochs=1, eval_loader={})": {"epochs": 1, "eval_loader": {}},
    "(epochs=1, resume='auto')": {"epochs": 1, "resume": "auto"},
}
_HOOKS: dict[str, Callable[[], Any]] = {
    "EarlyStopHook()": EarlyStopHook,
    "CheckpointHook('c', best='eval_loss')": lambda: CheckpointHook("c", best="eval_loss"),
}


def _trainer(what: str, arguments: dict[str, Any], *, alone: bool) -> WrongCall:
    def prepare(place: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted("zero")
        given = {} if alone and not place.is_wrong else arguments
        return lambda: Trainer(booster, model, optimizer, **given)

    return WrongCall(name=f"{'rank 1 alone: ' if alone else ''}Trainer({what})", prepare=prepare)


def _fit(what: str, arguments: dict[str, Any], *, alone: bool) -> WrongCall:
    def prepare(place: CallSite) -> Callable[[], Any]:
        trainer = Trainer(*boosted("zero"))
        given = {"epochs": 1} if alone and not place.is_wrong else arguments
        loader = batches()
        return lambda: trainer.fit(loader, **given)

    return WrongCall(name=f"{'rank 1 alone: ' if alone else ''}Trainer.fit{what}", prepare=prepare)


def _hook(what: str, make: Callable[[], Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        trainer, loader = Trainer(*boosted("zero"), hooks=[make()]), batches()
        return lambda: trainer.fit(loader, epochs=1)

    return WrongCall(name=f"Trainer.fit() without eval_loader, with {what}", prepare=prepare)


def _handler(name: str) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        objects = boosted(name)
        return lambda: Trainer(*objects, gradient_handlers=[DataParallelGradientHandler])

    return WrongCall(name=f"{name}: Trainer(gradient_handlers=[DataParallelGradientHandler])", prepare=prepare)


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [
        *(_trainer(what, arguments, alone=False) for what, arguments in _TRAINERS.items()),
        _trainer("accumulate=0", {"accumulate": 0}, alone=True),
        *(_fit(what, arguments, alone=False) for what, arguments in _FITS.items()),
        _fit("(epochs=0)", {"epochs": 0}, alone=True),
        *(_hook(what, make) for what, make in _HOOKS.items()),
        *(_handler(name) for name in ("zero", "gemini", "fsdp", "tensor", "pipeline")),
    ]
