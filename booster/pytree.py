"""Mapping a function over all tensors of a nested batch or model output."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return `tree` with every tensor replaced by `function(tensor)`, without changing `tree`.

    Traverses mappings (dict, its subclasses, transformers' ModelOutput and BatchEncoding), lists, tuples, namedtuples
    and dataclass instances, to any depth. Other objects, and containers without a changed tensor, are returned
    unchanged.

    Args:
        function: Function of a tensor.
        tree: Tensor, container of tensors, or any other object.

    Example:
        >>> map_tensors(lambda t: t.double(), {"x": torch.ones(2), "name": "a"})["x"].dtype
        torch.float64
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):
        return _map_mapping(function, tree)
    if isinstance(tree, (list, tuple)):
        return _map_sequence(function, tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(function, tree)
    return tree


def _map_mapping(function: Callable[[torch.Tensor], Any], tree: MutableMapping[Any, Any]) -> Any:
    changed = _changes(function, dict(tree.items()))
    if not changed:
        return tree
    result = copy.copy(tree)  # keeps the default factory, attributes and order of subclasses
    for key, value in changed.items():
        result[key] = value
    return result


def _map_sequence(function: Callable[[torch.Tensor], Any], tree: list[Any] | tuple[Any, ...]) -> Any:
    changed = _changes(function, dict(enumerate(tree)))
    if not changed:
        return tree
    values = [changed.get(index, value) for index, value in enumerate(tree)]
    if isinstance(tree, list):
        result = copy.copy(tree)
        result[:] = values
        return result
    make = getattr(type(tree), "_make", None)  # a namedtuple's constructor takes its fields one by one
    return make(values) if make is not None else type(tree)(values)


def _map_dataclass(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if hasattr(tree, field.name)}
    changed = _changes(function, fields)
    if not changed:
        return tree
    result = copy.copy(tree)
    for name, value in changed.items():
        object.__setattr__(result, name, value)  # frozen dataclasses refuse setattr; the copy is ours
    return result


def _changes(function: Callable[[torch.Tensor], Any], items: dict[Any, Any]) -> dict[Any, Any]:
    mapped = {key: map_tensors(function, value) for key, value in items.items()}
    return {key: value for key, value in mapped.items() if value is not items[key]}
