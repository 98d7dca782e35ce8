"""Exchanges a module's class for one derived from it, so that what asks for its kind still finds it."""

from __future__ import annotations

import functools

from torch import nn

from booster.plugins.sharding.compiling import not_compiled

__all__ = ["become", "class_before"]


def become(module: nn.Module, kind: type[nn.Module], split: object) -> None:
    """Puts `kind` before a module's class.

    Args:
        module: Keeps its parameters, buffers and hooks.
        kind: Its forward may call `super().forward`, which is the module's own.
        split: Becomes the attribute `_split`, for `kind` to read.
    """
    module.__class__ = _derived(kind, type(module))  # type: ignore[arg-type]
    module._split = split  # type: ignore[assignment]


def class_before(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module had before `become`."""
    return type(module).__mro__[2]


@functools.cache
def _derived(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    members = {"__module__": kind.__module__, "forward": not_compiled(kind.forward)}
    return type(kind.__name__ + base.__name__, (kind, base), members)
