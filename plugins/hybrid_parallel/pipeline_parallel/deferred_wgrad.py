"""Deferred weight gradients: the W step of zero-bubble schedules.

Note [Deferred weight gradients]
A stage's backward computes the gradient of its input, which the previous stage needs at once, and those of its weights,
which are needed only by the optimizer's step. Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241) compute the latter where a stage would be idle. So linear layers, which have nearly all weights, save
their input and the gradient of their output. The gradient computed later passes through autograd to the parameter,
with the same reductions, hooks and accumulation as in the backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from booster.core.layer_stacks import subclass_of
from booster.plugins.hybrid_parallel.tensor_parallel.deferred_wgrad import (
    add_matmuls,
    deferrable_matmul,
    set_wgrad_queue,
    sum_of_matmuls,
)
from booster.plugins.hybrid_parallel.tensor_parallel.embedding import VocabParallelHead
from booster.plugins.hybrid_parallel.tensor_parallel.linear import ColumnParallel, RowParallel, is_transposed
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear as is_linear_layer

_Pair = tuple[torch.Tensor, torch.Tensor]


class DeferredWeightGrads:
    """Queue of the deferred weight gradients of one stage; see Note [Deferred weight gradients].

    A deep copy of a prepared layer keeps using the same queue.
    """

    def __init__(self) -> None:
        self._pending: dict[Hashable, dict[int, _PendingGrad]] = {}
        # Not thread-local, as backward may run in autograd's threads.
        self._current: dict[int, _PendingGrad] | None = None
        self._disabled_hooks: dict[int, _DisabledHooks] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredWeightGrads:
        return self

    @contextmanager
    def deferring(self, key: Hashable) -> Iterator[None]:
        """Context in which backward defers weight gradients under a key.

        Several backwards may use one key. Other gradients are computed at once: those of biases, of weights that other
        modules than linear layers use, or with `create_graph=True`.
        """
        if self._current is not None:
            raise RuntimeError("weight gradients are already being deferred by another backward")
        self._current = self._pending.setdefault(key, {})
        try:
            yield
        finally:
            self._current = None
            for hooks in self._disabled_hooks.values():
                hooks.restore()
            self._disabled_hooks.clear()
            if not self._pending[key]:
                del self._pending[key]

    def compute(self, key: Hashable) -> None:
        """Compute the gradients deferred under a key, if any, and accumulate them as backward would have.

        Collective if hooks of the parameters are.
        """
        pending = list(self._pending.pop(key, {}).values())
        if not pending:
            return
        with torch.enable_grad():
            # Autograd processes the last created node first; each gradient is accumulated before the next is computed.
            roots: list[torch.Tensor] = [
                _DeferredGrad.apply(one.weight, one)  # type: ignore[no-untyped-call]
                for one in reversed(pending)
            ]
        torch.autograd.backward(roots, [root.detach() for root in roots])

    def discard(self) -> None:
        """Drop all deferred gradients, after an error."""
        self._pending.clear()

    @property
    def is_deferring(self) -> bool:
        """Whether the current backward defers gradients."""
        return self._current is not None

    def put(self, weight: torch.Tensor, pairs: Sequence[_Pair]) -> None:
        """Save the factors of a weight's gradient in the current backward.

        Args:
            weight: Leaf tensor.
            pairs: Matrices whose sum of `left.t() @ right` is the gradient, or the first rows and columns of it.
        """
        if self._current is None:
            raise AssertionError("a gradient was deferred outside of deferring()")
        if id(weight) not in self._disabled_hooks:
            self._disabled_hooks[id(weight)] = _DisabledHooks(weight)
        self._current.setdefault(id(weight), _PendingGrad(weight)).keep(pairs)


def defer_weight_gradients(model: nn.Module, gradients: DeferredWeightGrads) -> None:
    """Prepare a model's linear layers to defer the gradients of their weights, in place.

    Applies to `nn.Linear`, transformers' `Conv1D`, and their subclasses without an overridden forward, tensor parallel
    or not. Names of modules and parameters, `isinstance` and `copy.deepcopy` keep working. Call it after layers were
    sharded for tensor parallelism. Not collective.

    Args:
        model: Model whose layers are all prepared, replacing earlier queues.
        gradients: Queue of the stage that runs the model.
    """
    for module in model.modules():
        if isinstance(module, (ColumnParallel, RowParallel, VocabParallelHead)):
            set_wgrad_queue(module, gradients)
        elif is_linear_layer(module) and "forward" not in vars(module):
            owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
            is_conv1d = owner.__name__ == "Conv1D" and owner.__module__ == "transformers.pytorch_utils"
            if "_gradient_keeper" not in vars(module) and (owner is nn.Linear or is_conv1d):
                module.__class__ = subclass_of(type(module), "deferring", _deferring_members)
            set_wgrad_queue(module, gradients)


class _PendingGrad:
    """Factors of one weight's gradient; nothing else of the graph is kept alive."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self._pairs: list[_Pair] = []
        self._versions: list[tuple[int, int]] = []

    def keep(self, pairs: Sequence[_Pair]) -> None:
        for left, right in pairs:
            self._pairs.append((left.detach(), right.detach()))
            self._versions.append((left._version, right._version))

    def accumulate_or_compute(self) -> torch.Tensor | None:
        """Accumulate into `.grad` in one pass, and free the factors.

        Returns:
            None, or the gradient if there is no plain `.grad`, or tensor hooks need it.
        """
        gradient = self.weight.grad
        is_plain = gradient is not None and gradient.layout == torch.strided and gradient.dtype == self.weight.dtype
        if gradient is None or not is_plain or self.weight._backward_hooks:
            return sum_of_matmuls(self._pop_pairs(), self.weight.shape)
        add_matmuls(gradient, self._pop_pairs())
        return None

    def _pop_pairs(self) -> list[_Pair]:
        pairs, self._pairs = self._pairs, []
        if self._versions != [(left._version, right._version) for left, right in pairs]:
            raise RuntimeError(
                f"the input of a linear layer with a weight of shape {tuple(self.weight.shape)}, or the gradient of its"
                " output, was changed in place before the weight's gradient was computed, which a schedule that defers"
                " weight gradients does after the backward: change a copy of it"
            )
        return pairs


class _DeferredGrad(torch.autograd.Function):
    """Empty output of a weight, whose backward computes the deferred gradient and passes it to the weight.

    If the weight has a gradient already, the new one is accumulated directly; post-accumulate hooks are called as well.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, pending: _PendingGrad) -> torch.Tensor:
        ctx.pending = pending
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.pending.accumulate_or_compute(), None


class _DisabledHooks:
    """Replaces a weight's hooks until `restore`, so that they are called only for actual gradients.

    A backward that defers a gradient still reaches the weight, with None. Autograd then calls the weight's tensor hooks
    with None, and its post-accumulate hooks although nothing was accumulated. A reducer would take that for a gradient.
    Gradients may still arrive from other uses of the weight, such as an embedding.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._has_arrived = False
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        tensor_hooks: dict[int, Any] = weight._backward_hooks or {}
        followers: dict[int, Any] = weight._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
        self._changes: list[tuple[dict[int, Any], int, Any, Any]] = [
            (hooks, number, hook, functools.partial(filtered_call, hook))
            for hooks, filtered_call in ((tensor_hooks, _unless_none), (followers, self._call_if_arrived))
            for number, hook in hooks.items()
        ]
        for hooks, number, _, ours in self._changes:
            hooks[number] = ours
        if followers:
            self._handle = weight.register_hook(self._on_gradient)

    def restore(self) -> None:
        """Restore the hooks that were not removed in the meantime."""
        for hooks, number, before, ours in self._changes:
            if hooks.get(number) is ours:
                hooks[number] = before
        if self._handle is not None:
            self._handle.remove()

    def _on_gradient(self, gradient: torch.Tensor | None) -> None:
        self._has_arrived = gradient is not None

    def _call_if_arrived(self, hook: Callable[[torch.Tensor], None], weight: torch.Tensor) -> None:
        if self._has_arrived:
            hook(weight)


def _unless_none(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


def _deferring_members(base: type[nn.Module]) -> dict[str, Any]:
    """Return the members of a linear layer that can defer weight gradients."""
    plain = base.forward
    (_, input_name) = inspect.signature(plain).parameters

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = (args or (kwargs.get(input_name),))[0] if len(args) + len(kwargs) == 1 else None
        y = None if x is None else deferrable_matmul(self, x, self.bias, is_transposed=is_transposed(self))  # type: ignore[arg-type]
        return plain(self, *args, **kwargs) if y is None else y  # type: ignore[no-any-return]

    return {"forward": forward}
