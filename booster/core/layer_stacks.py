"""Stacks of equal layers in a model, and modules whose class is replaced by a subclass of the same name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from torch import nn

_Make = Callable[[Any], Mapping[str, Any]]
_PURPOSE = "_subclass_purpose"  # attributes of the subclasses
_DERIVATION = "_subclass_derivation"
_subclasses: dict[tuple[type[nn.Module], str, type[nn.Module] | None, Hashable], type[nn.Module]] = {}

STACK_ADVICE = "put the layers, of one class of your own that has two or more modules with weights, in an nn.ModuleList"


def find_stacks(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of the layers of every stack, in order.

    A stack is a list (`nn.ModuleList`, or an `nn.Sequential` of two or more) of modules of one class that contain
    further modules with parameters. Stacks are not nested. A list of experts is not a stack: experts run in parallel.
    """
    found: list[tuple[str, ...]] = []
    _collect(model, "", found)
    return tuple(found)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of all stacks by name, in order."""
    return {name: model.get_submodule(name) for stack in find_stacks(model) for name in stack}


def stack_layer_of(name: str, stacks: tuple[tuple[str, ...], ...]) -> str | None:
    """Return the name of the stack's layer that is or contains a module, or None outside of all stacks."""
    for stack in stacks:
        for layer in stack:
            if name == layer or name.startswith(f"{layer}."):
                return layer
    return None


def subclass_of(
    base: type[nn.Module],
    purpose: str,
    make: _Make = lambda base: {},
    *,
    mixin: type[nn.Module] | None = None,
    prefix: str = "",
    settings: Hashable = None,
    below: Collection[str] = (),
) -> type[nn.Module]:
    """Return a subclass of the same name with the members of `make(base)`, and of a mixin. `isinstance` keeps working.

    Args:
        base: Class of a module.
        purpose: Purpose of the subclass.
        make: Function that returns the members, which may call those of its argument; optional.
        mixin: First base class, optional.
        prefix: Prefix of the name, optional.
        settings: What the members depend on in addition, optional: there is one subclass per purpose and settings.
        below: Purposes of other subclasses, optional: those that `base` is one of are derived anew from this one.
    """
    if vars(base).get(_PURPOSE) in below:
        original, outer, arguments = vars(base)[_DERIVATION]
        inner = subclass_of(original, purpose, make, mixin=mixin, prefix=prefix, settings=settings, below=below)
        return subclass_of(inner, outer, **arguments)
    key = base, purpose, mixin, settings
    if key not in _subclasses:
        arguments = {"make": make, "mixin": mixin, "prefix": prefix, "settings": settings}
        own = {"__module__": base.__module__, "__doc__": base.__doc__, _PURPOSE: purpose}
        members = {**own, _DERIVATION: (base, purpose, arguments), **make(base)}
        bases = (base,) if mixin is None else (mixin, base)
        _subclasses[key] = type(prefix + base.__name__, bases, members)
    return _subclasses[key]


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
