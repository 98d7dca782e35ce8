"""Deferred weight gradients: the W step of zero-bubble schedules.

Note [Deferred weight gradients]
A stage's backward computes the gradient of its input, which the previous stage needs at once, and those of its weights,
which are needed only by the optimizer's step. Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241) compute the latter where a stage would be idle. So linear layers, which have nearly all weights, put
their input and the gradient of their output into a queue. The backward decides that when it reaches the layer: the
graph is the same in both cases. The gradient computed later passes through autograd to the parameter, with the same
reductions, hooks and accumulation as in the backward. With create_graph=True it is computed immediately by
differentiable operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_Pair = tuple[torch.Tensor, torch.Tensor]
_PLAIN = (torch.Tensor, nn.Parameter)  # other subclasses may override the matmul


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


@dataclass(frozen=True, slots=True)
class DeferredWGrad:
    """A weight with a deferrable gradient.

    Attributes:
        weight: The weight, a leaf.
        queue: Queue that decides whether the gradient is deferred, and receives its operands.
    """

    weight: torch.Tensor
    queue: DeferredWeightGrads

    @property
    def should_defer(self) -> bool:
        """Whether the running backward has to defer this weight's gradient."""
        if not self.queue.is_deferring or torch.is_grad_enabled():
            return False
        # A backward with other `inputs=` and `autograd.grad` do not accumulate into `.grad`.
        try:
            node = torch.autograd.graph.get_gradient_edge(self.weight).node
            return torch._C._will_engine_execute_node(node)  # type: ignore[no-any-return]
        except RuntimeError:  # raised if `autograd.grad` returns this gradient
            return False

    def put(self, *pairs: _Pair) -> None:
        """Enqueue pairs of matrices; see `DeferredWeightGrads.put`."""
        self.queue.put(self.weight, pairs)


def deferred_wgrad(layer: nn.Module) -> DeferredWGrad | None:
    """Return the deferrable gradient of a layer's weight, or None if the layer has no queue or needs no gradient."""
    queue: Any = getattr(layer, "_wgrad_queue", None)
    weight: Any = layer.weight if queue is not None else None
    if type(weight) not in _PLAIN or not weight.is_leaf or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    return DeferredWGrad(weight, queue)


def deferrable_matmul(
    layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, *, is_transposed: bool, num_outputs: int | None = None
) -> torch.Tensor | None:
    """Multiply with a layer's weight; backward defers the weight's gradient if its queue is deferring.

    Args:
        layer: The linear layer.
        x: Input of any number of dimensions, features last.
        bias: Bias of the output, or None.
        is_transposed: If True, the weight is (inputs, outputs).
        num_outputs: Number of leading output features to compute; optional, defaults to all.

    Returns:
        The output, or None if the gradient is not deferrable: the weight is not a leaf that trains, or autocast,
        tracing or functorch has to see the matmul.
    """
    deferred = deferred_wgrad(layer)
    if deferred is None or x.is_meta or type(x) not in _PLAIN:
        return None
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    is_strided = x.is_floating_point() and x.layout is torch.strided and x.dim() > 1
    if needs_cast(x, deferred.weight) or not is_strided:
        return None
    y: torch.Tensor = _DeferrableMatmul.apply(
        x.flatten(0, -2), deferred.weight, bias, deferred, is_transposed, num_outputs
    )  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1]) if x.dim() > 2 else y


def sum_of_matmuls(pairs: Sequence[_Pair], shape: torch.Size) -> torch.Tensor:
    """Return the sum of `left.t() @ right`, padded with zeros to a shape."""
    (left, right), *others = pairs
    total = left.t() @ right
    if total.shape != shape:
        total = nn.functional.pad(total, (0, shape[1] - total.shape[1], 0, shape[0] - total.shape[0]))
    add_matmuls(total, others)
    return total


def add_matmuls(total: torch.Tensor, pairs: Sequence[_Pair]) -> None:
    """Add `left.t() @ right` of each pair to the first rows and columns of a matrix, in place."""
    for left, right in pairs:
        total[: left.shape[1], : right.shape[1]].addmm_(left.t(), right)


def needs_cast(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a matmul of both needs a cast: their dtypes differ, or autocast is enabled."""
    return torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype


def weight_matrix(weight: torch.Tensor, is_transposed: bool, num_outputs: int | None) -> torch.Tensor:
    """Return a linear layer's weight, or its first rows, as (outputs, inputs)."""
    matrix = weight.t() if is_transposed else weight
    return matrix if num_outputs is None else matrix[:num_outputs]


def weight_gradient_operands(
    grad: torch.Tensor, x: torch.Tensor, is_transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `left` and `right` of a weight's gradient `left.t() @ right`.

    Args:
        grad: Gradient of the linear layer's output.
        x: The layer's input.
        is_transposed: If True, the weight is (inputs, outputs).
    """
    rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
    return (inputs, rows) if is_transposed else (rows, inputs)


class _DeferrableMatmul(torch.autograd.Function):
    """Matmul of 2-d rows. It does not return views, so that callers may modify the output in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        deferred: DeferredWGrad,
        is_transposed: bool,
        num_outputs: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.deferred, ctx.is_transposed, ctx.num_outputs, ctx.shape = deferred, is_transposed, num_outputs, weight.shape
        return nn.functional.linear(x, weight_matrix(weight, is_transposed, num_outputs), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad @ weight_matrix(weight, ctx.is_transposed, ctx.num_outputs) if needs_x else None
        grad_weight = None
        if needs_weight:
            pair = weight_gradient_operands(grad, x, ctx.is_transposed)
            if ctx.deferred.should_defer:
                ctx.deferred.put(pair)
            else:
                grad_weight = sum_of_matmuls([pair], ctx.shape)
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None, None, None
