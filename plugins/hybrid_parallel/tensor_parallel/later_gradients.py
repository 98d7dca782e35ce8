"""Products with weights whose gradients may be left for later than the backward that comes through them.

Note [Later gradients]
The gradient of a linear layer's weight is a product of two matrices, the layer's input and the gradient of its output,
and nothing in the backward needs it. So the backward can hand the two to someone who multiplies them at a better time.
Whether it does is asked when it gets there: the graph is the same either way. Where the graph of backward itself is
asked for, everything is computed at once and by differentiable operations.
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
    """Keeps what gradients of weights are made of until they are computed. Backward may ask it in any thread."""

    @property
    def is_deferring(self) -> bool:
        """Whether the backward that runs now leaves gradients of weights for later."""

    def keep(self, weight: torch.Tensor, pairs: Sequence[_Pair]) -> None:
        """Keeps pairs of matrices; the sum of `left.t() @ right` is added to the gradient of the leaf `weight`."""


@dataclass(frozen=True, slots=True)
class LaterGradient:
    """A weight whose gradient a keeper may compute later; see Note [Later gradients].

    Attributes:
        weight: A leaf.
        keeper: Says whether it does, and then gets what the gradient is made of.
    """

    weight: torch.Tensor
    keeper: GradientKeeper

    @property
    def is_asked_for(self) -> bool:
        """Whether the backward that runs now hands pairs to `keep` rather than to multiply them."""
        return self.keeper.is_deferring and not torch.is_grad_enabled() and _is_accumulated(self.weight)

    def keep(self, *pairs: _Pair) -> None:
        """Hands over pairs of matrices; see `GradientKeeper.keep`."""
        self.keeper.keep(self.weight, pairs)


def keep_gradients_in(layer: nn.Module, keeper: GradientKeeper) -> None:
    """Lets a layer's backward leave the gradient of its weight to a keeper, if `later_gradient` is asked about it."""
    layer._gradient_keeper = keeper  # type: ignore[assignment]


def later_gradient(layer: nn.Module) -> LaterGradient | None:
    """Returns how the gradient of a layer's weight is left for later; None: it is not."""
    keeper: Any = getattr(layer, "_gradient_keeper", None)
    weight: Any = layer.weight if keeper is not None else None
    if not _is_ordinary(weight) or not weight.is_leaf or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    return LaterGradient(weight, keeper)


def deferrable_product(
    layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, *, is_transposed: bool, num_outputs: int | None = None
) -> torch.Tensor | None:
    """Returns a layer's product, whose backward leaves the weight's gradient for later if it is asked to.

    Args:
        layer: Whose weight it is.
        x: Of any number of dimensions, features last.
        bias: What is added to the product.
        is_transposed: The weight is (inputs, outputs).
        num_outputs: Only the first so many output features; None: all.

    Returns:
        None where the gradient can't be left: it is no parameter's, or who casts, traces or transforms the product
        has to see it.
    """
    later = later_gradient(layer)
    if later is None or x.is_meta or not _is_plain_product(x, later.weight):
        return None
    y: torch.Tensor = _Product.apply(x.flatten(0, -2), later.weight, bias, later, is_transposed, num_outputs)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1]) if x.dim() > 2 else y


def sum_of_products(pairs: Sequence[_Pair], shape: torch.Size) -> torch.Tensor:
    """Returns the sum of `left.t() @ right`, with zeros where the shape is larger than those of the products."""
    (left, right), *others = pairs
    total = left.t() @ right
    if total.shape != shape:
        total = nn.functional.pad(total, (0, shape[1] - total.shape[1], 0, shape[0] - total.shape[0]))
    add_products(total, others)
    return total


def add_products(total: torch.Tensor, pairs: Sequence[_Pair]) -> None:
    """Adds `left.t() @ right` of each pair to the first rows and columns of a matrix, in place."""
    for left, right in pairs:
        total[: left.shape[1], : right.shape[1]].addmm_(left.t(), right)


def _is_plain_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if not _is_ordinary(x) or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    is_cast = torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype
    return not is_cast and x.is_floating_point() and x.layout is torch.strided and x.dim() > 1


def _is_accumulated(weight: torch.Tensor) -> bool:
    """Returns whether the backward that runs now adds to `.grad`: not with `inputs=` of others, nor `autograd.grad`."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)  # type: ignore[no-any-return]
    except RuntimeError:  # what it says where `autograd.grad` returns this very gradient
        return False


def _is_ordinary(x: object) -> bool:
    """Returns whether a tensor is no subclass's, which may do anything in a product."""
    return type(x) in (torch.Tensor, nn.Parameter)


class _Product(torch.autograd.Function):
    """Of rows; the tensors that it returns are no views, so that others may change them in place."""

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
    """Returns the weight, or its first rows, as (outputs, inputs)."""
    matrix = weight.t() if is_transposed else weight
    return matrix if num_outputs is None else matrix[:num_outputs]
