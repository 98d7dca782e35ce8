"""Calls of all ranks in which rank 1 alone is wrong: the error is the same on all, without waiting for a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faults.mistakes.models import boosted, pair, plugin
from faults.mistakes.wrong_call import CallSite, WrongCall
from torch.optim.lr_scheduler import StepLR

from booster import Booster
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

WORLD_SIZE = 2

_PLUGINS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (TorchDDPPlugin, {}, {"bucket_cap_mb": 0}),
    (LowLevelZeroPlugin, {"precision": "fp32"}, {"stage": 3}),
    (GeminiPlugin, {"precision": "fp32"}, {"placement_policy": "disk"}),
    (TorchFSDPPlugin, {}, {"sharding_strategy": "FULL"}),
    (HybridParallelPlugin, {"precision": "fp32"}, {"tp_size": 3}),
]
# What rank 1 gives in place of the model and the optimizer.
_BOOSTS: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "a list for a model": lambda model, optimizer: ([model], optimizer),
    "a class for a model": lambda model, optimizer: (type(model), optimizer),
    "the optimizer first": lambda model, optimizer: (optimizer, model),
    "another model's optimizer": lambda model, _: (model, pair()[1]),
    "a number for a criterion": lambda model, optimizer: (model, optimizer, 0.5),
}
_CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "save() of a plain model": (lambda b, m, o: b.save("c", m, o), lambda b, m, o: b.save("c", m.unwrap(), o)),
    "save(step=-1)": (lambda b, m, o: b.save("c", m, step=1), lambda b, m, o: b.save("c", m, step=-1)),
    "save_model('m.ckpt')": (
        lambda b, m, o: b.save_model(m, "m.safetensors"),
        lambda b, m, o: b.save_model(m, "m.ckpt"),
    ),
    "save_optimizer() of the model": (
        lambda b, m, o: b.save_optimizer(o, "o.bin"),
        lambda b, m, o: b.save_optimizer(m, "o.bin"),
    ),
    "load(verify='fast')": (lambda b, m, o: b.load("c", m), lambda b, m, o: b.load("c", m, verify="fast")),
    "load_model() of a plain model": (
        lambda b, m, o: b.load_model(m, "m"),
        lambda b, m, o: b.load_model(m.unwrap(), "m"),
    ),
}


def _made(kind: Any, right: dict[str, Any], wrong: dict[str, Any]) -> WrongCall:
    def prepare(place: CallSite) -> Callable[[], Any]:
        arguments = {**right, **wrong} if place.is_wrong else right
        return lambda: kind(**arguments)

    shown = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
    return WrongCall(name=f"rank 1 alone: {kind.__name__}({shown})", prepare=prepare)


def _boosted(name: str, what: str, wrong: Callable[[Any, Any], tuple[Any, ...]]) -> WrongCall:
    def prepare(place: CallSite) -> Callable[[], Any]:
        booster = Booster(plugin=plugin(name))
        given = wrong(*pair()) if place.is_wrong else pair()
        return lambda: booster.boost(*given)

    return WrongCall(name=f"rank 1 alone: {name}: boost() with {what}", prepare=prepare)


def _called(what: str, right: Callable[..., Any], wrong: Callable[..., Any]) -> WrongCall:
    def prepare(place: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted("zero")
        call = wrong if place.is_wrong else right
        return lambda: call(booster, model, optimizer)

    return WrongCall(name=f"rank 1 alone: {what}", prepare=prepare)


def _scheduler() -> WrongCall:
    def prepare(place: CallSite) -> Callable[[], Any]:
        booster, _model, optimizer = boosted()
        given = optimizer if place.is_wrong else StepLR(optimizer, 1)
        return lambda: booster.save_lr_scheduler(given, "s.json")

    return WrongCall(name="rank 1 alone: save_lr_scheduler() of an optimizer", prepare=prepare)


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [
        *(_made(*entry) for entry in _PLUGINS),
        *(_boosted(name, what, wrong) for name in ("ddp", "gemini", "fsdp") for what, wrong in _BOOSTS.items()),
        *(_called(what, *calls) for what, calls in _CALLS.items()),
        _scheduler(),
    ]
