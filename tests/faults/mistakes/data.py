"""Loaders and what ranks read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from faults.mistakes.models import pair, plugin
from faults.mistakes.wrong_call import CallSite, WrongCall
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from booster import Booster, DistCoordinator

WORLD_SIZE = 2


class _Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(8))


class _Sampler:
    def __init__(self, dataset: Any) -> None:
        pass


def _load(what: str, **arguments: Any) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster = Booster(plugin=plugin("ddp"))
        given = {"dataset": torch.ones(8, 3), "batch_size": 2, **arguments}
        return lambda: booster.prepare_dataloader(**given)

    return WrongCall(name=f"prepare_dataloader({what})", prepare=prepare)


def _boost(what: str, make: Callable[[], Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, (model, optimizer), loader = Booster(plugin=plugin("ddp")), pair(), make()
        return lambda: booster.boost(model, optimizer, None, loader)

    return WrongCall(name=f"boost() with a loader {what}", prepare=prepare)


def _coordinate(what: str, call: Callable[[DistCoordinator], Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        coordinator = DistCoordinator()
        return lambda: call(coordinator)

    return WrongCall(name=f"DistCoordinator.{what}", prepare=prepare)


def _prioritised(coordinator: DistCoordinator, rank: Any) -> None:
    with coordinator.priority_execution(rank):
        pass


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [
        _load("batch_size=0", batch_size=0),
        _load("batch_size='2'", batch_size="2"),
        _load("batch_size=None", batch_size=None),
        _load("batch_size=2.0", batch_size=2.0),
        _load("an empty dataset", dataset=[]),
        _load("a dataset without a length", dataset=(number for number in range(3))),
        _load("a loader", dataset=DataLoader([1, 2, 3])),
        _load("drop_last=True and too few samples", batch_size=8, drop_last=True),
        _load("shuffle='yes'", shuffle="yes"),
        _load("drop_last='no'", drop_last="no"),
        _load("seed='a'", seed="a"),
        _load("seed=-1", seed=-1),
        _load("num_workers=-1", num_workers=-1),
        _load("num_workers='2'", num_workers="2"),
        _load("sampler=", sampler=RandomSampler([1, 2])),
        _load("batch_sampler=", batch_sampler=[[0]]),
        _load("in_order=False", in_order=False),
        _load("worker=2", worker=2),
        _load("collate_fn=3", collate_fn=3),
        _load("prefetch_factor=2 without workers", prefetch_factor=2),
        _load("persistent_workers=True without workers", persistent_workers=True),
        _load("timeout=-1", timeout=-1),
        _load("distributed_sampler_cls=_Sampler", distributed_sampler_cls=_Sampler),
        _load("distributed_sampler_cls=3", distributed_sampler_cls=3),
        _load("an IterableDataset, shuffle=True", dataset=_Stream(), shuffle=True),
        _load(
            "a loader without other arguments but shuffle", dataset=DataLoader([1, 2]), batch_size=None, shuffle=True
        ),
        _boost("with a sampler without a length", lambda: DataLoader([1, 2, 3], sampler=iter([0, 1]))),  # type: ignore[arg-type]
        _boost("without batches", lambda: DataLoader([1, 2, 3], batch_size=None)),
        _boost("over no samples", lambda: DataLoader([])),
        _coordinate("priority_execution(2)", lambda coordinator: _prioritised(coordinator, 2)),
        _coordinate("priority_execution(-1)", lambda coordinator: _prioritised(coordinator, -1)),
        _coordinate("priority_execution('0')", lambda coordinator: _prioritised(coordinator, "0")),
    ]
