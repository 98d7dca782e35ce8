"""Specs of trees of tensors: what travels between stages beside the tensors, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from booster.comm import TensorMeta
from booster.errors import ConfigError

# Note [Tree specs]
# A spec is nested tuples whose first entry is the kind. A container has the name of its class (None for the built-in
# one), which the receiving rank looks up among its imported modules, as it runs the same model. Nothing of a message is
# executed except the construction of tuples, lists, dicts and dataclass instances. Values carry their type, as
# 1 == True, and floats are hexadecimal, as nan != nan. So equal specs mean equal trees, and equal bytes.
# Dataclass instances are created without their constructors, with all their attributes, because the arguments of a
# constructor may differ from the fields. transformers' ModelOutput is a dict and a dataclass.
_Node = tuple[Any, ...]

_CONTAINERS: Mapping[str, type] = {"tuple": tuple, "list": list, "dict": dict}


@dataclass(frozen=True, slots=True)
class TensorLeaf(TensorMeta):
    """Metadata of a tensor in a tree; `requires_grad` tells whether its gradient is sent back."""

    requires_grad: bool


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """Structure of a tree without its tensors' data; see Note [Tree specs].

    Attributes:
        root: Nested tuples.
        tensors: Metadata of the tree's tensors, each once, in the order of `flatten`.
    """

    root: _Node
    tensors: tuple[TensorLeaf, ...]

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree with these tensors, as many as `self.tensors`."""
        if len(tensors) != len(self.tensors):
            raise ValueError(f"a tree of {len(self.tensors)} tensors can't be built from {len(tensors)}")
        return _build(self.root, tensors)

    def encode(self) -> bytes:
        """Return the spec as JSON, equal for equal specs."""
        tensors = [[str(one.dtype).removeprefix("torch."), one.shape, one.requires_grad] for one in self.tensors]
        return json.dumps([self.root, tensors], separators=(",", ":")).encode()

    @staticmethod
    def decode(content: bytes) -> TreeSpec:
        """Return the spec encoded by `encode`, possibly in another process.

        Raises:
            ConfigError: The content is invalid, or names a class that this process has not imported, or that is not a
                dataclass, tuple, list or dict.
        """
        try:
            root, tensors = json.loads(content)
            forms = tuple(TensorLeaf(tuple(shape), _dtype(name), bool(grad)) for name, shape, grad in tensors)
            return TreeSpec(_checked(root, len(forms)), forms)
        except ConfigError:
            raise
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"{bytes(content[:80])!r} does not describe a tree of tensors, as a message between pipeline stages has"
                " to: run the same program and the same version of the library on all ranks"
            ) from error


def flatten(tree: Any) -> tuple[list[torch.Tensor], TreeSpec]:
    """Flatten a tree.

    Args:
        tree: Dense tensor, None, bool, int, float or str, or any tuple, list, dict, namedtuple or dataclass instance of
            these, nested to any depth.

    Returns:
        The distinct tensors, and the spec that rebuilds the tree from them.

    Raises:
        ConfigError: The tree has a value of another type; the message has its path.
    """
    walk = _Flattener()
    root = walk.node(tree, "")
    leaves = tuple(TensorLeaf(tuple(one.shape), one.dtype, one.requires_grad) for one in walk.tensors)
    return walk.tensors, TreeSpec(root, leaves)


class _Flattener:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._index_of: dict[int, int] = {}

    def node(self, value: Any, path: str) -> _Node:
        """Return the node of a value at a path such as `[0].logits`."""
        if isinstance(value, torch.Tensor):
            return ("tensor", self._tensor_index(value, path))
        simple = _simple_node(value)
        if simple is not None:
            return simple
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            names += [name for name in getattr(value, "__dict__", ()) if name not in names]
            attributes = tuple((name, self.node(getattr(value, name), f"{path}.{name}")) for name in names)
            items = self._items(value, path) if isinstance(value, dict) else ()
            return ("dataclass", _class_name(value, None, path), attributes, items)
        if isinstance(value, dict):
            return ("dict", _class_name(value, dict, path), self._items(value, path))
        for kind in (tuple, list):
            if isinstance(value, kind):
                children = tuple(self.node(child, f"{path}[{index}]") for index, child in enumerate(value))
                return (kind.__name__, _class_name(value, kind, path), children)
        raise ConfigError(
            f"{_what(value, path)}, which can't travel between pipeline stages: only tensors, None, bool, int, float,"
            " str and tuples, lists, dicts, namedtuples and dataclasses of these do. Return these from the layer (for a"
            " cache of keys and values: call the model with use_cache=False), or end the stage behind another layer"
        )

    def _tensor_index(self, tensor: torch.Tensor, path: str) -> int:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ConfigError(
                f"{_what(tensor, path)} of layout {tensor.layout} and dtype {tensor.dtype}, which can't travel between"
                " pipeline stages: return a dense tensor from the layer, or end the stage behind another layer"
            )
        if id(tensor) not in self._index_of:
            self._index_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._index_of[id(tensor)]

    def _items(self, value: Mapping[Any, Any], path: str) -> tuple[_Node, ...]:
        items = []
        for key, child in value.items():
            key_node = _simple_node(key)
            if key_node is None:
                raise ConfigError(
                    f"{_what(value, path)} with a key of type {type(key).__name__}, which can't travel between pipeline"
                    " stages: use str, int, bool, float or None as keys"
                )
            items.append((key_node, self.node(child, f"{path}[{key!r}]")))
        return tuple(items)


def _simple_node(value: Any) -> _Node | None:
    # By exact type: an enum may be an int, and numpy's float64 is a float.
    if value is None:
        return ("none",)
    if type(value) in (bool, int, str):
        return (type(value).__name__, value)
    return ("float", value.hex()) if type(value) is float else None


def _build(node: _Node, tensors: Sequence[torch.Tensor]) -> Any:
    kind = node[0]
    if kind == "tensor":
        return tensors[node[1]]
    if kind == "float":
        return float.fromhex(node[1])
    if kind in ("none", "bool", "int", "str"):
        return node[1] if len(node) > 1 else None
    cls = _class_of(node)
    if kind in ("tuple", "list"):
        children = [_build(child, tensors) for child in node[2]]
        make = getattr(cls, "_make", None)  # a namedtuple's constructor takes separate arguments
        return cls(children) if make is None else make(children)
    made = cls.__new__(cls)
    items = node[2] if kind == "dict" else node[3]
    for key, child in items:
        made[_build(key, tensors)] = _build(child, tensors)
    if kind == "dataclass":
        for name, child in node[2]:
            object.__setattr__(made, name, _build(child, tensors))  # frozen dataclasses raise in setattr
    return made


def _checked(node: Any, num_tensors: int) -> _Node:
    kind, *rest = node
    if kind == "tensor" and rest[0] in range(num_tensors):
        return ("tensor", int(rest[0]))
    if kind == "none" and not rest:
        return ("none",)
    if kind in ("bool", "int", "str") and type(rest[0]).__name__ == kind:
        return (kind, rest[0])
    if kind == "float":
        float.fromhex(rest[0])
        return ("float", rest[0])
    if kind in ("tuple", "list"):
        checked: _Node = (kind, rest[0], tuple(_checked(child, num_tensors) for child in rest[1]))
    elif kind == "dict":
        checked = (kind, rest[0], _checked_items(rest[1], num_tensors))
    elif kind == "dataclass":
        attributes = tuple((str(name), _checked(child, num_tensors)) for name, child in rest[1])
        checked = (kind, rest[0], attributes, _checked_items(rest[2], num_tensors))
    else:
        raise ValueError(kind)
    _class_of(checked)  # raises for an unknown class
    return checked


def _checked_items(items: Any, num_tensors: int) -> tuple[_Node, ...]:
    return tuple((_checked(key, num_tensors), _checked(child, num_tensors)) for key, child in items)


def _class_of(node: _Node) -> Any:
    kind, name = node[:2]
    if name is None and kind in _CONTAINERS:
        return _CONTAINERS[kind]
    found = _look_up(name)
    if not isinstance(found, type):
        raise ConfigError(
            f"a message from another pipeline stage holds a {name}, which this process has not imported"
            f" ({'no such name' if found is None else f'it found {found!r}'}): import it at the top of the program, on"
            " all ranks"
        )
    if not (issubclass(found, _CONTAINERS[kind]) if kind in _CONTAINERS else dataclasses.is_dataclass(found)):
        raise ConfigError(
            f"a message from another pipeline stage says that {name} is a {kind}, but here it is not ({found!r}):"
            " run the same program on all ranks"
        )
    return found


def _look_up(name: str) -> Any:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found


def _class_name(value: Any, plain: type | None, path: str) -> str | None:
    cls = type(value)
    if cls is plain:
        return None
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _look_up(name) is not cls:
        raise ConfigError(
            f"{_what(value, path)}, which can't travel between pipeline stages, as another process does not find its"
            f" class by the name {name}: define the class at the top of a module"
        )
    return name


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype


def _what(value: Any, path: str) -> str:
    place = f" (at {path} of its output)" if path else ""
    return f"a layer returned a {type(value).__module__}.{type(value).__qualname__}{place}"
