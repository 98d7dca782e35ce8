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

__all__ = [
    "GradientKeeper",
    "LaterGradient",
    "add_products",
    "deferrable_product",
    "keep_gradients_in",
    "later_gradient",
    "sum_of_products",
]

_Pair = tuple[torch.Tensor, torch.Tensor]


class GradientKeeper(Protocol):
    """Queue of the operands of deferred weight gradients. Backward may call it from any thread."""

    @property
    def is_deferring(self) -> bool:
        """Whether the running backward defers weight gradients."""

    def keep(self, weight: torch.Tensor, pairs: Sequence[_Pair]) -> None:
        """Enqueue pairs of matrices; the sum of `left.t() @ right` is later added to the gradient of `weight`."""


@dataclass(frozen=True, slots=True)
class LaterGradient:
    """A weight with a deferrable gradient.

    Attributes:
        weight: The weight, a leaf.
        keeper: Queue that decides whether the gradient is deferred, and receives its operands.
    """

    weight: torch.Tensor
    keeper: GradientKeeper

    @property
    def is_asked_for(self) -> bool:
        """Whether the running backward has to defer this weight's gradient."""
        return self.keeper.is_deferring and not torch.is_grad_enabled() and _is_accumulated(self.weight)

    def keep(self, *pairs: _Pair) -> None:
        """Enqueue pairs of matrices; see `GradientKeeper.keep`."""
        self.keeper.keep(self.weight, pairs)


def keep_gradients_in(layer: nn.Module, keeper: GradientKeeper) -> None:
    """Attach the queue that `later_gradient` returns for a layer."""
    layer._gradient_keeper = keeper  # type: ignore[assignment]


def later_gradient(layer: nn.Module) -> LaterGradient | None:
    """Return the deferrable gradient of a layer's weight, or None if the layer has no queue or needs no gradient."""
    keeper: Any = getattr(layer, "_gradient_keeper", None)
    weight: Any = layer.weight if keeper is not None else None
    if not _is_ordinary(weight) or not weight.is_leaf or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    return LaterGradient(weight, keeper)


def deferrable_product(
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
    later = later_gradient(layer)
    if later is None or x.is_meta or not _is_plain_product(x, later.weight):
        return None
    y: torch.Tensor = _Product.apply(x.flatten(0, -2), later.weight, bias, later, is_transposed, num_outputs)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1]) if x.dim() > 2 else y


def sum_of_products(pairs: Sequence[_Pair], shape: torch.Size) -> torch.Tensor:
    """Return the sum of `left.t() @ right`, padded with zeros to a shape."""
    (left, right), *others = pairs
    total = left.t() @ right
    if total.shape != shape:
        total = nn.functional.pad(total, (0, shape[1] - total.shape[1], 0, shape[0] - total.shape[0]))
    add_products(total, others)
    return total


def add_products(total: torch.Tensor, pairs: Sequence[_Pair]) -> None:
    """Add `left.t() @ right` of each pair to the first rows and columns of a matrix, in place."""
    for left, right in pairs:
        total[: left.shape[1], : right.shape[1]].addmm_(left.t(), right)


def _is_plain_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if not _is_ordinary(x) or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    is_cast = torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype
    return not is_cast and x.is_floating_point() and x.layout is torch.strided and x.dim() > 1


def _is_accumulated(weight: torch.Tensor) -> bool:
    """Whether the running backward accumulates into `.grad`: not with other `inputs=`, nor in `autograd.grad`."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)  # type: ignore[no-any-return]
    except RuntimeError:  # raised if `autograd.grad` returns this gradient
        return False


def _is_ordinary(x: object) -> bool:
    """Whether a tensor is not of a subclass, which may override the matmul."""
    return type(x) in (torch.Tensor, nn.Parameter)


class _Product(torch.autograd.Function):
    """Matmul of 2-d rows. It does not return views, so that callers may modify the output in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        later: LaterGradient,
        is_transposed: bool,
        num_outputs: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.later, ctx.is_transposed, ctx.num_outputs, ctx.shape = later, is_transposed, num_outputs, weight.shape
        return nn.functional.linear(x, _matrix(weight, is_transposed, num_outputs), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad @ _matrix(weight, ctx.is_transposed, ctx.num_outputs) if needs_x else None
        grad_weight = None
        if needs_weight:
            pair = (x, grad) if ctx.is_transposed else (grad, x)
            if ctx.later.is_asked_for:
                ctx.later.keep(pair)
            else:
                grad_weight = sum_of_products([pair], ctx.shape)
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None, None, None


def _matrix(weight: torch.Tensor, is_transposed: bool, num_outputs: int | None) -> torch.Tensor:
    """Return the weight, or its first rows, as (outputs, inputs)."""
    matrix = weight.t() if is_transposed else weight
    return matrix if num_outputs is None else matrix[:num_outputs]
