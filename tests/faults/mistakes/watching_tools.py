"""Monitor, estimates of memory, and the choice of a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faults.mistakes.models import batches, boosted, pair
from faults.mistakes.wrong_call import CallSite, WrongCall

from booster import AutoPlugin, Booster, Monitor, autoparallelize, estimate_memory

WORLD_SIZE = 2

_MONITORS: list[dict[str, Any]] = [
    {"log": "."},
    {"log": 3},
    {"tensorboard": 3},
    {"progress": "yes"},
    {"total_steps": 0},
    {"every": 0},
    {"every": "10"},
    {"first_step": -1},
    {"tokens": 512},
    {"hang_seconds": 0},
    {"across_ranks": "yes"},
]
_ESTIMATES: list[dict[str, Any]] = [
    {"plugin": 3},
    {"plugin": "ddp"},
    {"num_ranks": 0},
    {"num_ranks": "8"},
    {"settings": 3},
    {"settings": {"stag": 1}},
    {"plugin": "torch_ddp", "mixed_precision": "fp17"},
    {"optimizer": "AdamW"},
    {"device_memory": "80GiB"},
    {"device_memory": 0},
]


def _monitor(arguments: dict[str, Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        _booster, model, optimizer = boosted()
        return lambda: Monitor(model, optimizer, **arguments)

    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return WrongCall(name=f"Monitor({shown})", prepare=prepare)


def _monitor_of(what: str, objects: Callable[[Any, Any], tuple[Any, Any]]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        given = objects(*boosted()[1:])
        return lambda: Monitor(*given)

    return WrongCall(name=f"Monitor() of {what}", prepare=prepare)


def _closed_monitor() -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        monitor = Monitor(*boosted()[1:])
        return lambda: monitor.log(loss=0.5)

    return WrongCall(name="Monitor.log() outside of its block", prepare=prepare)


def _estimate(arguments: dict[str, Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        model, batch = pair()[0], batches()[0]
        given = {"plugin": "low_level_zero", "batch": batch, "criterion": lambda out, _: out.mean(), **arguments}
        return lambda: estimate_memory(model, **given)

    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return WrongCall(name=f"estimate_memory({shown})", prepare=prepare)


_CHOICES: list[dict[str, Any]] = [
    {"objective": "speed"},
    {"device_memory_budget": 0},
    {"device_memory_budget": "much"},
    {"candidates": []},
    {"candidates": ["ddp"]},
    {"candidates": 3},
    {"verbose": "yes"},
]
_AUTOPARALLELIZED: list[dict[str, Any]] = [
    {},
    {"solver_preference": "pp"},
    {"dataloader_option": "replicated"},
    {"shard_option": "full"},
    {"logical_mesh_shape": (3, 1)},
    {"save_solver_solution": True},
]


def _choice(arguments: dict[str, Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        given = {"verbose": False, "batch": batches()[0], "criterion": lambda out, _: out.mean()}
        model, optimizer = pair()
        return lambda: Booster(plugin=AutoPlugin(**{**given, **arguments})).boost(model, optimizer)

    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return WrongCall(name=f"AutoPlugin({shown})", prepare=prepare)


def _without_a_batch() -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        model, optimizer = pair()
        return lambda: Booster(plugin="auto").boost(model, optimizer)

    return WrongCall(name="Booster(plugin='auto').boost() without a dataloader", prepare=prepare)


def _parallelized(arguments: dict[str, Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        model = pair()[0]
        return lambda: autoparallelize(model, **arguments)

    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return WrongCall(name=f"autoparallelize({shown})", prepare=prepare)


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [
        *(_monitor(arguments) for arguments in _MONITORS),
        _monitor_of("a plain model", lambda model, optimizer: (model.unwrap(), optimizer)),
        _monitor_of("a plain optimizer", lambda model, optimizer: (model, optimizer.optim)),
        _monitor_of("another model's optimizer", lambda model, _: (model, boosted()[2])),
        _closed_monitor(),
        *(_estimate(arguments) for arguments in _ESTIMATES),
        *(_choice(arguments) for arguments in _CHOICES),
        _without_a_batch(),
        *(_parallelized(arguments) for arguments in _AUTOPARALLELIZED),
    ]
