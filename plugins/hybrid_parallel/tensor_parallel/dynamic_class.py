"""Subclass a module's class at run time to override its forward; `isinstance` keeps working."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from booster.core.compiling import not_compiled
from booster.core.layer_stacks import subclass_of


def mixin_forward(module: nn.Module, mixin: type[nn.Module], config: object) -> None:
    """Make a module an instance of a new class with the bases `mixin` and the module's class.

    Args:
        module: Module to change in place; it keeps its parameters, buffers and hooks.
        mixin: Mixin whose forward may call the module's forward as `super().forward`.
        config: Value of the attribute `_split`, which `mixin` reads.
    """
    if "_split" in module.__dict__:
        raise AssertionError(f"the forward of a {type(module).__name__} is overridden twice")
    members = functools.partial(_members, mixin)
    module.__class__ = subclass_of(type(module), "parallel", members, mixin=mixin, prefix=mixin.__name__)
    module._split = config  # type: ignore[assignment]


def _members(mixin: type[nn.Module], base: type[nn.Module]) -> dict[str, Any]:
    eager, traced = not_compiled(mixin.forward), getattr(mixin, "traced_forward", None)

    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # `torch.compile` traces the forward if the layer has one that it can trace as it is configured.
        if torch.compiler.is_compiling():
            is_traceable = getattr(self._split, "is_traceable", None)
            if is_traceable is None or is_traceable(self):
                return traced(self, x, *args, **kwargs)  # type: ignore[misc]
        return eager(self, x, *args, **kwargs)

    return {"__module__": mixin.__module__, "forward": eager if traced is None else forward}
