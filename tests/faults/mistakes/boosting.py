"""What boost() is given, under every plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from faults.mistakes.models import Pair, batches, boosted, pair, plugin
from faults.mistakes.wrong_call import CallSite, WrongCall
from torch import nn
from torch.optim.lr_scheduler import StepLR

from booster import Booster

WORLD_SIZE = 2


def _lazy() -> tuple[nn.Module, None]:
    return nn.LazyLinear(3), None


def _meta() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Pair()
    return model, torch.optim.AdamW(model.parameters())


def _with_criterion(model: nn.Module) -> tuple[Any, ...]:
    criterion = nn.Bilinear(3, 3, 1)
    return model, torch.optim.AdamW([*model.parameters(), *criterion.parameters()]), criterion


# What boost() is given: a name, and the arguments made of a right model and optimizer.
_BOOSTS: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "a list for a model": lambda model, _: ([model],),
    "None for a model": lambda *_: (None,),
    "a class for a model": lambda *_: (Pair,),
    "the optimizer first": lambda model, optimizer: (optimizer, model),
    "a list for an optimizer": lambda model, optimizer: (model, [optimizer]),
    "a class for an optimizer": lambda model, _: (model, torch.optim.AdamW),
    "parameters for an optimizer": lambda model, _: (model, model.parameters()),
    "another model's optimizer": lambda model, _: (model, pair()[1]),
    "an optimizer of a criterion's parameters": lambda model, _: _with_criterion(model),
    "a number for a criterion": lambda model, optimizer: (model, optimizer, 0.5),
    "a dataset for a loader": lambda model, optimizer: (model, optimizer, None, batches()),
    "another optimizer's scheduler": lambda model, optimizer: (model, optimizer, None, None, StepLR(pair()[1], 1)),
    "a function for a scheduler": lambda model, optimizer: (model, optimizer, None, None, len),
    "a scheduler without an optimizer": lambda model, optimizer: (model, None, None, None, StepLR(optimizer, 1)),
}


def _boost(name: str, what: str, arguments: Callable[[], tuple[Any, ...]]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster = Booster(plugin=plugin(name))
        given = arguments()
        return lambda: booster.boost(*given)

    return WrongCall(name=f"{name}: boost() with {what}", prepare=prepare)


def _boosted_again(name: str) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted(name)
        return lambda: booster.boost(model, optimizer)

    return WrongCall(name=f"{name}: boost() of what boost() returned", prepare=prepare)


def _users_again() -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, model, _optimizer = boosted()
        users = model.unwrap()
        return lambda: booster.boost(users)

    return WrongCall(name="ddp: boost() of a model a second time", prepare=prepare)


def _optimizer_again() -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, _model, optimizer = boosted()
        model = pair()[0]
        return lambda: booster.boost(model, optimizer)

    return WrongCall(name="ddp: boost() of a new model with a boosted optimizer", prepare=prepare)


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    made = [_boost("ddp", what, lambda make=make: make(*pair())) for what, make in _BOOSTS.items()]
    for name in ("ddp", "zero", "gemini", "fsdp", "tensor"):
        made.append(_boost(name, "a lazy module", _lazy))
    for name in ("ddp", "zero", "gemini"):  # the others make the values
        made.append(_boost(name, "a model on the meta device", _meta))
    for name in ("zero", "gemini", "fsdp", "tensor", "pipeline"):
        made.append(_boost(name, "another model's optimizer", lambda: (pair()[0], pair()[1])))
        made.append(_boosted_again(name))
    return [*made, _users_again(), _optimizer_again()]
