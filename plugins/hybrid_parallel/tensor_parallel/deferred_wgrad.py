"""Matmuls whose weight gradients can be deferred to after the backward.

The gradient of a linear layer's weight is the matmul of the layer's input and the gradient of its output. Nothing else
in the backward depends on it, so the backward can put both matrices into a queue. It decides when it reaches the layer:
the graph is the same in both cases. With create_graph=True the gradient is computed immediately by differentiable
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

_Pair = tuple[torch.Tensor, torch.Tensor]
_PLAIN = (torch.Tensor, nn.Parameter)  # other subclasses may override the matmul


class WGradQueue(Protocol):
    """Queue of the operands of deferred weight gradients. Backward may call it from any thread."""

    @property
    def is_deferring(self) -> bool:
        """Whether the running backward defers weight gradients."""

    def put(self, weight: torch.Tensor, pairs: Sequence[_Pair]) -> None:
        """Enqueue pairs of matrices; the sum of `left.t() @ right` is later added to the gradient of `weight`."""


@dataclass(frozen=True, slots=True)
class DeferredWGrad:
    """A weight with a deferrable gradient.

    Attributes:
        weight: The weight, a leaf.
        queue: Queue that decides whether the gradient is deferred, and receives its operands.
    """

    weight: torch.Tensor
    queue: WGradQueue

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
        """Enqueue pairs of matrices; see `WGradQueue.put`."""
        self.queue.put(self.weight, pairs)


def set_wgrad_queue(layer: nn.Module, queue: WGradQueue) -> None:
    """Attach the queue that `deferred_wgrad` returns for a layer."""
    layer._gradient_keeper = queue  # type: ignore[assignment]


def deferred_wgrad(layer: nn.Module) -> DeferredWGrad | None:
    """Return the deferrable gradient of a layer's weight, or None if the layer has no queue or needs no gradient."""
    queue: Any = getattr(layer, "_gradient_keeper", None)
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
