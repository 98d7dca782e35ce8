"""Subclass a module's class at run time to override its forward; `isinstance` keeps working."""

from __future__ import annotations

import functools

from torch import nn

from booster.plugins.sharding.compiling import not_compiled

__all__ = ["become", "class_before"]


def become(module: nn.Module, kind: type[nn.Module], split: object) -> None:
    """Make a module an instance of a new class with the bases `kind` and the module's class.

    Args:
        module: Module to change in place; it keeps its parameters, buffers and hooks.
        kind: Mixin whose forward may call the module's forward as `super().forward`.
        split: Value of the attribute `_split`, which `kind` reads.
    """
    module.__class__ = _derived(kind, type(module))  # type: ignore[arg-type]
    module._split = split  # type: ignore[assignment]


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before `become`."""
    return type(module).__mro__[2]


@functools.cache
def _derived(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    members = {"__module__": kind.__module__, "forward": not_compiled(kind.forward)}
    return type(kind.__name__ + base.__name__, (kind, base), members)
