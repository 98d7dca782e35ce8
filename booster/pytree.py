"""Walk over the tensors of a nested batch or model output.

`torch.utils._pytree` knows containers by their exact, registered class. It takes a user's dataclass, a `UserDict` or a
subclass of dict for a leaf, and rebuilds containers in which nothing has changed. Registering users' classes would
change how torch.compile and FSDP2 treat them, so this walk asks what a container can do instead.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return `tree` with every tensor replaced by `function(tensor)`, without changing `tree`.

    Traverses mappings (dict, its subclasses, transformers' ModelOutput and BatchEncoding), lists, tuples, namedtuples
    and dataclass instances, to any depth. Other objects, and containers without a changed tensor, are returned
    unchanged.

    Args:
        function: Function of a tensor.
        tree: Tensor, container of tensors, or any other object.

    Examples:
        >>> map_tensors(lambda t: t.double(), {"x": torch.ones(2), "name": "a"})["x"].dtype
        torch.float64
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    held = children_of(tree)
    if held is None:
        return tree
    return with_children(tree, {key: map_tensors(function, child) for key, child in held.items()})


def iter_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of `tree`, in the order of `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        yield tree
    for child in (children_of(tree) or {}).values():
        yield from iter_tensors(child)


def map_first(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree with its first tensor that requires a gradient replaced by `function(tensor)`."""
    first = next((one for one in iter_tensors(tree) if one.requires_grad), None)
    return map_tensors(lambda one: function(one) if one is first else one, tree)


def children_of(tree: Any) -> Mapping[Any, Any] | None:
    """Return the children of a container by key, index or field name, or None."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, MutableMapping):
        return dict(tree.items())
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {
            field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if hasattr(tree, field.name)
        }
    return None


def with_children(tree: Any, replacements: Mapping[Any, Any]) -> Any:
    """Return a container of the same class with these children; the same object if none has changed."""
    before = children_of(tree) or {}
    changed = {key: child for key, child in replacements.items() if child is not before[key]}
    if not changed:
        return tree
    if isinstance(tree, tuple):
        make = getattr(type(tree), "_make", None)  # a namedtuple's constructor takes its fields one by one
        return make(replacements.values()) if make is not None else type(tree)(replacements.values())
    result = copy.copy(tree)  # keeps a default factory, attributes and the order
    for key, child in changed.items():
        if isinstance(tree, (MutableMapping, list)):
            result[key] = child
        else:
            object.__setattr__(result, key, child)  # frozen dataclasses raise in setattr
    return result


def copy_with_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], value: Any, memo: dict[int, Any] | None = None
) -> Any:
    """Return a deep copy of a value with `function(tensor)` instead of every tensor.

    Args:
        function: Called once for every tensor, and with the data of every parameter. Its result must not share memory
            with the tensor.
        value: Any value that `copy.deepcopy` accepts.
        memo: Memo of `copy.deepcopy`: replacements of objects by `id`.
    """
    with _TensorCopies(function):
        return copy.deepcopy(value, memo)


class _TensorCopies(TorchFunctionMode):
    """Redirects `Tensor.__deepcopy__`, and `clone`, which the `__deepcopy__` of a parameter calls."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._function(args[0])  # the mode is off in here
        return func(*args, **(kwargs or {}))
