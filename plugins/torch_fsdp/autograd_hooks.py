"""Hooks of a module that find the begin and the end of its backward, by its outputs and by its inputs' gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from booster.pytree import map_tensors

from .fsdp2_internals import hooked_tensors


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

    def register(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors replaced by hooked views."""
        views: list[torch.Tensor] = []

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            views.append(tensor.view_as(tensor))
            return views[-1]

        if not torch.is_grad_enabled():
            return args, kwargs
        viewed: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(view, args), map_tensors(view, kwargs)
        if views:
            self._handles.append(register_multi_grad_hook(views, self._callback))
        return viewed

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


class ViewSafeOutputs:
    """Forward hook that runs before FSDP2's own.

    FSDP2 gathers weights for backward in a hook on each output tensor that it finds. This fails silently in two cases:
    if an output is a view that the caller modifies in place, autograd replaces the node that the hook is on; and in
    objects other than containers and dataclasses no tensor is found. In both, backward would read freed weights. So
    views are cloned, and once no tensor was found the weights of the module stay gathered until after backward.

    Args:
        module: Module that `fully_shard` is about to be applied to.
        clones_views: If True, views are cloned; needed where the weights are freed after forward.
    """

    def __init__(self, module: nn.Module, *, clones_views: bool) -> None:
        self._clones_views = clones_views
        module.register_forward_hook(self)
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", module="torch")

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output for FSDP2 and the caller."""
        if not torch.is_grad_enabled():
            return output
        tensors = hooked_tensors(output)
        if not tensors:
            assert isinstance(module, FSDPModule)
            module.set_reshard_after_forward(False, recurse=False)
        if self._clones_views and any(one._base is not None for one in tensors):
            return map_tensors(lambda one: one.clone() if one.requires_grad and one._base is not None else one, output)
        return output
