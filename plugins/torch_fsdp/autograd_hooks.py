"""Autograd hooks that detect the end of a module's backward by the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from booster.pytree import map_tensors


class InputGradHook:
    """Calls back in backward when the gradients of a module's inputs are ready.

    FSDP2 passes the inputs through an autograd function, whose outputs can't be modified in place: a block that begins
    with `x += ...` fails. Views can be modified. So here each input becomes a view of itself, with one multi-grad hook
    on all of them. If one is modified in place its hook is lost, and the end of the model's backward stands in for it.

    The hook keeps its graph alive. A `_HookGuard` on the module's outputs removes it when the graph could be freed.

    Args:
        module: Module that `fully_shard` was applied to.
        callback: Callback in backward when the inputs' gradients are ready.
    """

    def __init__(self, module: nn.Module, callback: Callable[..., None]) -> None:
        self._callback = callback
        self._handles: list[RemovableHandle] = []
        module.register_forward_hook(self.bind_to_outputs)

    def register(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with tensors replaced by hooked views."""
        views: list[torch.Tensor] = []

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            views.append(tensor.view_as(tensor))
            return views[-1]

        if not torch.is_grad_enabled():
            return args, kwargs
        args, kwargs = map_tensors(view, args), map_tensors(view, kwargs)
        if views:
            self._handles.append(register_multi_grad_hook(views, self._callback))
        return args, kwargs

    def remove(self) -> None:
        """Remove the hooks of forwards that did not complete."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def bind_to_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """Bind the lifetime of this forward's hooks to its outputs."""
        if not self._handles:
            return
        guard = _HookGuard(self._handles)
        self._handles = []

        def tie(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                tensor.register_hook(guard)
            return tensor

        map_tensors(tie, output)


class _HookGuard:
    """Removes hooks when it is garbage-collected."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def __call__(self, gradient: torch.Tensor) -> None:
        """No-op in backward."""

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", ()):  # a compiler makes copies without calling __init__
            handle.remove()
