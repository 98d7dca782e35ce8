"""Stacks of equal layers in a model, and layers whose class is replaced by a subclass of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_Make = Callable[[Any], dict[str, Any]]
_subclasses: dict[tuple[type[nn.Module], object], type[nn.Module]] = {}


def find_stacks(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of the layers of every stack, in order.

    A stack is a list (`nn.ModuleList`, or an `nn.Sequential` of two or more) of modules of one class that contain
    further modules with parameters. Stacks are not nested. A list of experts is not a stack: experts run in parallel.
    """
    found: list[tuple[str, ...]] = []
    _collect(model, "", found)
    return tuple(found)


def stack_layer_of(name: str, stacks: tuple[tuple[str, ...], ...]) -> str | None:
    """Return the name of the stack's layer that is or contains a module, or None outside of all stacks."""
    for stack in stacks:
        for layer in stack:
            if name == layer or name.startswith(f"{layer}."):
                return layer
    return None


def subclass_of(base: type[nn.Module], purpose: object, make: _Make, below: object = None) -> type[nn.Module]:
    """Return a subclass of the same name with the members of `make(base)`.

    Args:
        base: Class of a layer.
        purpose: Purpose of the subclass, hashable; there is one per purpose.
        make: Function that returns the members, which may call those of its argument.
        below: Purpose of another subclass, optional: if `base` is one, it is derived anew from the new subclass.
    """
    if below is not None and vars(base).get("_subclass_purpose") == below:
        return subclass_of(subclass_of(base.__base__, purpose, make), below, base._subclass_members)  # type: ignore[arg-type, attr-defined]
    if (base, purpose) not in _subclasses:
        members = {**make(base), "__module__": base.__module__, "__doc__": base.__doc__}
        members |= {"_subclass_purpose": purpose, "_subclass_members": staticmethod(make)}
        _subclasses[base, purpose] = type(base.__name__, (base,), members)
    return _subclasses[base, purpose]


def _collect(module: nn.Module, name: str, found: list[tuple[str, ...]]) -> None:
    children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
    is_list = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(children) > 1)
    is_uniform = len({type(child) for child in children.values()}) == 1
    is_experts = "expert" in name.rpartition(".")[2]
    if is_list and is_uniform and not is_experts and all(_is_layer(child) for child in children.values()):
        found.append(tuple(children))
        return
    for child_name, child in children.items():
        _collect(child, child_name, found)


def _is_layer(module: nn.Module) -> bool:
    """Whether a module has its own forward and at least two descendants with parameters."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    holders = [
        one for one in module.modules() if one is not module and any(True for _ in one.parameters(recurse=False))
    ]
    return len(holders) > 1
