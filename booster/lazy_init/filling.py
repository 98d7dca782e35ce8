"""Gives lazy tensors their values, one storage at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from booster.lazy_init.guard import refresh_class
from booster.lazy_init.record import Geometry, Record, replay, view_of
from booster.lazy_init.storage import record_of

__all__ = ["materialize", "materialize_own", "materialize_tensor"]


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor in fresh CPU memory; a lazy one stays lazy.

    May be called in any order and any number of times: the values are always those that an ordinary build of the model
    gives, and torch's generators are left as they are. Needs memory for the whole storage that the tensor is a view of.

    Args:
        tensor: Lazy or not.

    Raises:
        ConfigError: an operator of the model's code can't be run again with the same result; the message names it.
    """
    record = record_of(tensor)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if record is None:
            return tensor.detach().to("cpu", copy=True)
        storage = replay(record)
        values = view_of(storage, Geometry.of(tensor))
        if values.numel() * values.element_size() < storage.nbytes():
            return values.clone()
        return values


def materialize(module: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Returns the module with all of its lazy parameters, buffers and other tensors filled, in place.

    Every parameter and buffer stays the same object, so optimizers over them and ties go on working; tensors that share
    memory share it afterwards too. Peak memory is that of the filled model and twice its largest tensor.

    Args:
        module: Built in a `LazyInitContext`, wholly or in part; what is not lazy is left alone.
        device: Where the values go; without it the context's `default_device`.

    Raises:
        ConfigError: an operator of the model's code can't be run again with the same result; the message names it.
    """
    materialize_own(module.modules(), device)
    return module


def materialize_own(modules: Iterable[nn.Module], device: torch.device | str | None = None) -> None:
    """Fills the lazy tensors that the given modules hold themselves; those of their children stay lazy.

    Like `materialize` for a part of a model: tensors of the given modules that share memory share it afterwards too,
    and one that shares memory with a tensor elsewhere in the model gets memory of its own, with the same values.

    Args:
        modules: Whose tensors are filled.
        device: Where the values go; without it the context's `default_device`.

    Raises:
        ConfigError: an operator of the model's code can't be run again with the same result; the message names it.
    """
    sharing: dict[int, tuple[Record, dict[int, torch.Tensor]]] = {}
    for tensor in _tensors(modules):
        record = record_of(tensor)
        if record is not None:
            sharing.setdefault(id(record), (record, {}))[1][id(tensor)] = tensor
    for record, tensors in sharing.values():
        _fill(record, list(tensors.values()), torch.device(device) if device is not None else record.device)


def _fill(record: Record, tensors: list[torch.Tensor], device: torch.device) -> None:
    storage = replay(record)
    if device.type != "cpu":
        whole = Geometry(dtype=torch.uint8, size=torch.Size([storage.nbytes()]), stride=(1,), offset=0)
        storage = view_of(storage, whole).to(device).untyped_storage()
    for tensor in tensors:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            tensor.data = view_of(storage, Geometry.of(tensor))
        refresh_class(tensor)


def _tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yields the tensors that modules hold themselves: registered, as attributes, or in a list or dict of those."""
    seen: set[int] = set()
    for module in modules:
        for value in vars(module).values():
            yield from _in_containers(value, seen)


def _in_containers(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _in_containers(item, seen)
