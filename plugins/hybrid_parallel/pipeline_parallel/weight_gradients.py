"""Gradients of weights that are left out of a backward, and computed when a stage has nothing better to do.

Note [Weights that wait]
A stage's backward makes the gradient of its input, for which the stage before waits, and those of its weights, for
which nobody waits until the optimizer's step. Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241) run the second where a stage would be idle. So linear layers, which have nearly all weights, hand over
their input and the gradient of their output: see Note [Later gradients] for how. When the gradient is computed, it
goes through autograd to the parameter, which treats it as it would have in the backward: sums over ranks, other hooks,
accumulation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from booster.plugins.hybrid_parallel.tensor_parallel.embedding import VocabularyHead
from booster.plugins.hybrid_parallel.tensor_parallel.later_gradients import (
    add_products,
    deferrable_product,
    keep_gradients_in,
    sum_of_products,
)
from booster.plugins.hybrid_parallel.tensor_parallel.linear import ColumnParallel, RowParallel, is_transposed
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear as is_linear_layer

__all__ = ["WeightGradients", "defer_weight_gradients"]

_Pair = tuple[torch.Tensor, torch.Tensor]


class WeightGradients:
    """The gradients of one stage's weights that are still to be computed; see Note [Weights that wait].

    A deep copy of a layer that leaves its gradients here goes on to do so.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[int, _Waiting]] = {}
        self._current: dict[int, _Waiting] | None = None  # no thread's own: backward may run in the engine's threads
        self._silenced: dict[int, _SilencedHooks] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        return self

    @contextmanager
    def deferring(self, key: Hashable) -> Iterator[None]:
        """Leaves gradients of weights out of the backward that runs inside, under a key.

        Several backwards may use one key. All that can't be left (gradients of biases, of weights that others than
        linear layers use, or with `create_graph=True`) is computed as ever.
        """
        if self._current is not None:
            raise RuntimeError("gradients of weights are left under one key at a time, and another backward does so")
        self._current = self._waiting.setdefault(key, {})
        try:
            yield
        finally:
            self._current = None
            for hooks in self._silenced.values():
                hooks.restore()
            self._silenced.clear()
            if not self._waiting[key]:
                del self._waiting[key]

    def compute(self, key: Hashable) -> None:
        """Adds the gradients that wait under a key to `.grad`, as backward would have; maybe there are none.

        Collective where hooks of the parameters are.
        """
        waiting = list(self._waiting.pop(key, {}).values())
        if not waiting:
            return
        with torch.enable_grad():
            # The engine takes what was created last first; and each gradient is in its place before the next is made.
            roots: list[torch.Tensor] = [
                _Gradient.apply(one.weight, one)  # type: ignore[no-untyped-call]
                for one in reversed(waiting)
            ]
        torch.autograd.backward(roots, [root.detach() for root in roots])

    def discard(self) -> None:
        """Forgets everything that waits: after an error."""
        self._waiting.clear()

    @property
    def num_pending(self) -> int:
        """Number of keys under which something waits."""
        return sum(bool(waiting) for waiting in self._waiting.values())

    @property
    def is_deferring(self) -> bool:
        """Whether a backward that runs now leaves gradients here."""
        return self._current is not None

    def keep(self, weight: torch.Tensor, pairs: Sequence[_Pair]) -> None:
        """Keeps what the gradient of a weight is made of, for the backward that runs now.

        Args:
            weight: A leaf.
            pairs: The sum of `left.t() @ right` is the gradient, or the first rows and columns of it.
        """
        if self._current is None:
            raise AssertionError("a gradient was left by a backward that was not to leave any")
        if id(weight) not in self._silenced:
            self._silenced[id(weight)] = _SilencedHooks(weight)
        self._current.setdefault(id(weight), _Waiting(weight)).keep(pairs)


def defer_weight_gradients(model: nn.Module, gradients: WeightGradients) -> None:
    """Prepares a model's linear layers to leave gradients of their weights, in place.

    Those are `nn.Linear`, transformers' `Conv1D`, and classes derived from them without a forward of their own, split
    over ranks or not. Names of modules and parameters, what `isinstance` says of them, and `copy.deepcopy` stay.
    To be called after layers were split over ranks. Not collective.

    Args:
        model: All of its layers are prepared, also for other keepers before.
        gradients: Of the stage that runs the model.
    """
    for module in model.modules():
        if isinstance(module, (ColumnParallel, RowParallel, VocabularyHead)):
            keep_gradients_in(module, gradients)
        elif is_linear_layer(module) and "forward" not in vars(module):
            if "_gradient_keeper" not in vars(module) and _has_plain_forward(type(module)):
                module.__class__ = _deferring_class(type(module))  # type: ignore[arg-type]
            keep_gradients_in(module, gradients)


class _Waiting:
    """What the gradient of one weight is made of; no more of the graph than these matrices is kept alive."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self._pairs: list[_Pair] = []
        self._versions: list[tuple[int, int]] = []

    def keep(self, pairs: Sequence[_Pair]) -> None:
        """Keeps pairs without what they were computed from."""
        for left, right in pairs:
            self._pairs.append((left.detach(), right.detach()))
            self._versions.append((left._version, right._version))

    def take(self) -> torch.Tensor:
        """Returns the gradient, and lets go of what it is made of."""
        return sum_of_products(self._taken(), self.weight.shape)

    def add(self) -> bool:
        """Adds the gradient to the one that is there already, in one pass; False: there is none, or hooks want it."""
        gradient = self.weight.grad
        is_plain = gradient is not None and gradient.layout == torch.strided and gradient.dtype == self.weight.dtype
        if gradient is None or not is_plain or self.weight._backward_hooks:
            return False
        add_products(gradient, self._taken())
        return True

    def _taken(self) -> list[_Pair]:
        pairs, self._pairs = self._pairs, []
        if self._versions != [(left._version, right._version) for left, right in pairs]:
            raise RuntimeError(
                f"the input of a linear layer with a weight of shape {tuple(self.weight.shape)}, or the gradient of its"
                " output, was changed in place before the weight's gradient was computed, which a schedule that defers"
                " weight gradients does after the backward: change a copy of it"
            )
        return pairs


class _Gradient(torch.autograd.Function):
    """Nothing, made of a weight; its backward makes the gradient, which reaches the weight as any other.

    Where another one is there already it is added to that at once; what follows an accumulation is called all the same.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, waiting: _Waiting) -> torch.Tensor:
        ctx.waiting = waiting
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return None if ctx.waiting.add() else ctx.waiting.take(), None


# Note [Hooks of gradients that don't arrive]
# A backward that leaves a gradient out still comes to the weight, with None, and autograd calls the weight's hooks:
# those of the tensor with None, and those that follow an accumulation although nothing was accumulated. Sums over ranks
# or a reducer would take that for a gradient. So during such a backward these hooks are called only when a gradient
# arrives, as it may from others that use the weight, such as an embedding.


class _SilencedHooks:
    """Exchanges a weight's hooks until `restore`; see Note [Hooks of gradients that don't arrive]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._has_arrived = False
        self._changes: list[tuple[dict[int, Any], int, Any, Any]] = []
        self._note: torch.utils.hooks.RemovableHandle | None = None
        followers: dict[int, Any] = weight._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
        for number, hook in list((weight._backward_hooks or {}).items()):
            self._exchange(weight._backward_hooks, number, hook, functools.partial(_unless_none, hook))  # type: ignore[arg-type]
        for number, hook in list(followers.items()):
            self._exchange(followers, number, hook, functools.partial(self._follow, hook))
        if followers:
            self._note = weight.register_hook(self._take_note)

    def restore(self) -> None:
        """Puts the hooks back that are there still."""
        for hooks, number, before, ours in self._changes:
            if hooks.get(number) is ours:
                hooks[number] = before
        if self._note is not None:
            self._note.remove()

    def _exchange(self, hooks: dict[int, Any], number: int, before: Any, ours: Any) -> None:
        hooks[number] = ours
        self._changes.append((hooks, number, before, ours))

    def _take_note(self, gradient: torch.Tensor | None) -> None:
        self._has_arrived = gradient is not None

    def _follow(self, hook: Callable[[torch.Tensor], None], weight: torch.Tensor) -> None:
        if self._has_arrived:
            hook(weight)


def _unless_none(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


def _has_plain_forward(kind: type[nn.Module]) -> bool:
    """Returns whether a class of linear layers multiplies by its weight and adds its bias, and does nothing else."""
    definer = next(base for base in kind.__mro__ if "forward" in vars(base))
    return definer is nn.Linear or (definer.__name__ == "Conv1D" and definer.__module__ == "transformers.pytorch_utils")


@functools.cache
def _deferring_class(base: type[nn.Module]) -> type[nn.Module]:
    """Returns a class derived from a linear layer's, of the same name, whose products may leave gradients."""

    plain = base.forward
    (_, input_name) = inspect.signature(plain).parameters

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = (args or (kwargs.get(input_name),))[0] if len(args) + len(kwargs) == 1 else None
        y = None if x is None else deferrable_product(self, x, self.bias, is_transposed=is_transposed(self))  # type: ignore[arg-type]
        return plain(self, *args, **kwargs) if y is None else y  # type: ignore[no-any-return]

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
