"""The training loop: backward, clipping, accumulation, pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from faults.mistakes.models import batches, boosted
from faults.mistakes.wrong_call import CallSite, WrongCall
from torch import nn

WORLD_SIZE = 2
Call = Callable[[Any, Any, Any], Any]  # of booster, model and optimizer, boosted


def _criterion(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.mean()


def _accumulated(booster: Any, model: Any, optimizer: Any, steps: Any) -> None:
    with booster.accumulate(model, optimizer, steps):
        pass


def _accumulated_twice(booster: Any, model: Any, optimizer: Any) -> None:
    with booster.accumulate(model, optimizer, 2):
        _accumulated(booster, model, optimizer, 2)


def _debugged(booster: Any, model: Any, optimizer: Any, action: str) -> None:
    with booster.debug_nonfinite(model, optimizer, action=action):
        pass


def _without_sync(booster: Any, *given: Any) -> None:
    with booster.no_sync(*given):
        pass


def _piped(booster: Any, *given: Any, batch: Any = None) -> None:
    booster.execute_pipeline(iter(batches() if batch is None else [batch]), *given)


_CALLS: dict[str, Call] = {
    "clip_grad_norm_(max_norm=-1)": lambda b, m, o: b.clip_grad_norm_(o, -1),
    "clip_grad_norm_(max_norm='1')": lambda b, m, o: b.clip_grad_norm_(o, "1"),
    "clip_grad_norm_(max_norm=None)": lambda b, m, o: b.clip_grad_norm_(o, None),
    "clip_grad_norm_(norm_type=0)": lambda b, m, o: b.clip_grad_norm_(o, 1.0, 0),
    "clip_grad_norm_(norm_type='max')": lambda b, m, o: b.clip_grad_norm_(o, 1.0, "max"),
    "clip_grad_norm_() of the model": lambda b, m, o: b.clip_grad_norm_(m, 1.0),
    "clip_grad_norm_() of parameters": lambda b, m, o: b.clip_grad_norm_(m.parameters(), 1.0),
    "accumulate(steps=0)": lambda b, m, o: _accumulated(b, m, o, 0),
    "accumulate(steps=1.5)": lambda b, m, o: _accumulated(b, m, o, 1.5),
    "accumulate(steps='2')": lambda b, m, o: _accumulated(b, m, o, "2"),
    "accumulate() inside of accumulate()": _accumulated_twice,
    "accumulate() without an optimizer": lambda b, m, o: _accumulated(b, m, None, 2),
    "accumulate() of a plain optimizer": lambda b, m, o: _accumulated(b, m, o.optim, 2),
    "accumulate() of a plain model": lambda b, m, o: _accumulated(b, m.unwrap(), o, 2),
    "no_sync() without a model": lambda b, m, o: _without_sync(b),
    "no_sync() of a plain model": lambda b, m, o: _without_sync(b, m.unwrap()),
    "no_sync() of a plain optimizer": lambda b, m, o: _without_sync(b, m, o.optim),
    "execute_pipeline() of a list": lambda b, m, o: b.execute_pipeline(batches(), m, _criterion, o),
    "execute_pipeline() of a plain model": lambda b, m, o: _piped(b, m.unwrap(), _criterion, o),
    "execute_pipeline() with a plain optimizer": lambda b, m, o: _piped(b, m, _criterion, o.optim),
    "execute_pipeline() with a number for a criterion": lambda b, m, o: _piped(b, m, 0.5, o),
    "execute_pipeline() with an empty batch": lambda b, m, o: _piped(b, m, _criterion, o, batch=()),
    "execute_pipeline() with other keywords": lambda b, m, o: _piped(b, m, _criterion, o, batch={"y": batches()[0]}),
    "execute_pipeline() with too many inputs": lambda b, m, o: _piped(b, m, _criterion, o, batch=batches(2)),
    "summary() of a plain model": lambda b, m, o: b.summary(m.unwrap()),
    "summary() with a plain optimizer": lambda b, m, o: b.summary(m, o.optim),
    "gather_for_metrics() of a number": lambda b, m, o: b.gather_for_metrics(0.5),
    "gather_for_metrics() of an empty dict": lambda b, m, o: b.gather_for_metrics({}),
    "gather_for_metrics() of a list of ranges": lambda b, m, o: b.gather_for_metrics([range(2)]),
    "debug_nonfinite() of a plain model": lambda b, m, o: b.debug_nonfinite(m.unwrap()),
    "debug_nonfinite() with a plain optimizer": lambda b, m, o: b.debug_nonfinite(m, o.optim),
    "debug_nonfinite(action='stop')": lambda b, m, o: _debugged(b, m, o, "stop"),
    "join_uneven() of a number": lambda b, m, o: list(b.join_uneven(3)),
    "load_state_dict(assign=True)": lambda b, m, o: m.load_state_dict({}, assign=True),
}
_OF_OTHER_PLUGINS: list[tuple[str, str, Call]] = [
    ("zero", "no_sync() without an optimizer", lambda b, m, o: _without_sync(b, m)),
    ("tensor", "no_sync() without an optimizer", lambda b, m, o: _without_sync(b, m)),
    ("zero", "clip_grad_norm_(max_norm=nan)", lambda b, m, o: b.clip_grad_norm_(o, float("nan"))),
    ("zero", "optimizer.load_state_dict() of no group", lambda b, m, o: o.load_state_dict({"param_groups": []})),
    ("gemini", "clip_grad_norm_(norm_type=-1)", lambda b, m, o: b.clip_grad_norm_(o, 1.0, -1)),
    ("fsdp", "accumulate(steps=True)", lambda b, m, o: _accumulated(b, m, o, True)),
    ("pipeline", "execute_pipeline() of a list", lambda b, m, o: b.execute_pipeline(batches(), m, _criterion, o)),
    ("pipeline", "execute_pipeline() with a number for a criterion", lambda b, m, o: _piped(b, m, 0.5, o)),
    ("pipeline", "the model called directly", lambda b, m, o: m(batches()[0])),
]
# Of booster, optimizer and the model's outputs.
_BACKWARDS: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "backward() with a plain optimizer": lambda b, o, out: b.backward(out.mean(), o.optim),
    "backward() with the model": lambda b, o, out: b.backward(out.mean(), o.model),
    "backward() without an optimizer": lambda b, o, out: b.backward(out.mean(), None),
    "backward() of many numbers": lambda b, o, out: b.backward(out, o),
    "backward() of a float": lambda b, o, out: b.backward(0.5, o),
    "backward() of a detached loss": lambda b, o, out: b.backward(out.detach().sum(), o),
    "backward(num_items=-1)": lambda b, o, out: b.backward(out.sum(), o, -1),
    "backward(num_items=nan)": lambda b, o, out: b.backward(out.sum(), o, float("nan")),
    "backward(num_items='3')": lambda b, o, out: b.backward(out.sum(), o, "3"),
}


def _on_boosted(name: str, what: str, call: Call) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted(name)
        return lambda: call(booster, model, optimizer)

    return WrongCall(name=f"{name}: {what}", prepare=prepare)


def _backward(name: str, what: str, call: Callable[[Any, Any, torch.Tensor], Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted(name)
        outputs = model(batches()[0])
        return lambda: call(booster, optimizer, outputs)

    return WrongCall(name=f"{name}: {what}", prepare=prepare)


def _backward_after_clipping(name: str) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted(name)
        booster.backward(model(batches()[0]).mean(), optimizer)
        loss = model(batches()[0]).mean()
        booster.clip_grad_norm_(optimizer, 1.0)
        return lambda: booster.backward(loss, optimizer)

    return WrongCall(name=f"{name}: backward() after clipping", prepare=prepare)


def _items_of_one_part() -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted()
        with booster.no_sync(model, optimizer):
            booster.backward(model(batches()[0]).sum(), optimizer, 4)
        loss = model(batches()[0]).sum()
        return lambda: booster.backward(loss, optimizer)

    return WrongCall(name="ddp: backward() without num_items after one with it", prepare=prepare)


def _group_added(name: str) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        optimizer = boosted(name)[2]
        group = {"params": [nn.Parameter(torch.ones(2000))]}
        return lambda: optimizer.add_param_group(group)

    return WrongCall(name=f"{name}: add_param_group() of a foreign parameter", prepare=prepare)


def _closure_under_scaling() -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        optimizer = boosted(mixed_precision="fp16")[2]
        return lambda: optimizer.step(lambda: torch.ones(()))

    return WrongCall(name="ddp: step(closure) with mixed_precision='fp16'", prepare=prepare)


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [
        *(_on_boosted("ddp", what, call) for what, call in _CALLS.items()),
        *(_on_boosted(*entry) for entry in _OF_OTHER_PLUGINS),
        *(_backward("ddp", what, call) for what, call in _BACKWARDS.items()),
        *(
            _backward(name, what, _BACKWARDS[what])
            for name in ("zero", "gemini", "fsdp", "tensor")
            for what in ("backward() of many numbers", "backward(num_items=nan)")
        ),
        *(_backward_after_clipping(name) for name in ("zero", "gemini", "fsdp", "tensor")),
        *(_group_added(name) for name in ("zero", "gemini", "fsdp", "tensor")),
        _items_of_one_part(),
        _closure_under_scaling(),
    ]
