"""Notices in a backward that the gradients of a unit's inputs are there, so that its own are too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from booster.tensor_tree import map_tensors

__all__ = ["InputWatch"]

# Note [Watched inputs]
# FSDP2 passes a unit's inputs through an autograd function of its own, whose backward is the end of the unit's. What
# comes out of such a function can't be changed in place, so a block that begins with `x += ...` fails. Views can: here
# each input becomes a view of itself, with a hook that is called when all of their gradients are there. Where one is
# changed in place its hook is lost, and the unit's backward ends with that of the model.
# Such a hook keeps the graph alive that it is on, so it has to go with it: a *lifeline* on what the unit returned is
# freed when nobody can run the backward any more, and takes the hooks along.


class InputWatch:
    """Watches the inputs of a unit's forwards; see Note [Watched inputs].

    Args:
        module: The unit's.
        arrived: Called in a backward when the inputs' gradients are there.
    """

    def __init__(self, module: nn.Module, arrived: Callable[..., None]) -> None:
        self._arrived = arrived
        self._handles: list[RemovableHandle] = []
        module.register_forward_hook(self.tie)

    def watch(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns what goes into the forward in the place of its arguments."""
        watched: list[torch.Tensor] = []

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            watched.append(tensor.view_as(tensor))
            return watched[-1]

        if not torch.is_grad_enabled():
            return args, kwargs
        args, kwargs = map_tensors(view, args), map_tensors(view, kwargs)
        if watched:
            self._handles.append(register_multi_grad_hook(watched, self._arrived))
        return args, kwargs

    def drop(self) -> None:
        """Forgets forwards that have not come to their end."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def tie(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ties the hooks of this forward to what it returns."""
        if not self._handles:
            return
        lifeline = _Lifeline(self._handles)
        self._handles = []

        def tie(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                tensor.register_hook(lifeline)
            return tensor

        map_tensors(tie, output)


class _Lifeline:
    """Removes hooks when nobody holds it any more."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def __call__(self, gradient: torch.Tensor) -> None:
        """Is called in backward, and changes nothing."""

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", ()):  # a compiler makes copies without calling __init__
            handle.remove()
