"""Chunked matmul and reduce-scatter of row-parallel layers; see Note [Chunks]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from booster.plugins.hybrid_parallel.tensor_parallel.chunks import Chunks, Span
from booster.plugins.hybrid_parallel.tensor_parallel.later_gradients import LaterGradient
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.regions import gather_parts

__all__ = ["gradient_pair", "scattered_product", "weight_gradient"]


def scattered_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    ranks: TensorParallelRanks,
    sizes: Sequence[int],
    *,
    is_transposed: bool,
    later: LaterGradient | None = None,
) -> torch.Tensor:
    """Return the reduce-scatter of `x @ weight.t()` over the tokens, like `scatter_sum` of that product.

    Args:
        x: Input with tokens in the second to last dimension, the same number on all ranks, and features last.
        weight: Weight (outputs, inputs).
        ranks: The tensor-parallel group.
        sizes: Number of tokens of each rank, not all 0.
        is_transposed: If True, the weight is (inputs, outputs).
        later: The weight's deferrable gradient; optional, defaults to computing it in backward.

    Collective: in forward and backward.
    """
    y: torch.Tensor = _ScatteredProduct.apply(x, weight, ranks, tuple(sizes), is_transposed, later)  # type: ignore[no-untyped-call]
    return y


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        ranks: TensorParallelRanks,
        sizes: tuple[int, ...],
        is_transposed: bool,
        later: LaterGradient | None,
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.ranks, ctx.sizes, ctx.is_transposed, ctx.later = ranks, sizes, is_transposed, later
        chunks = Chunks(ranks, sizes)
        matrix = weight.t() if is_transposed else weight

        def product(span: Span) -> torch.Tensor:
            return nn.functional.linear(chunks.take(x, span), matrix)

        y, finish = chunks.start_sum(product, x, matrix.shape[0])
        finish()
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if weight is not None and ctx.is_transposed:
            weight = weight.t()
        if torch.is_grad_enabled():
            whole = gather_parts(grad, ctx.ranks, grad.dim() - 2, ctx.sizes)
            grad_x = None if weight is None else whole @ weight
        else:
            whole, grad_x = _gathered_product(grad, weight, Chunks(ctx.ranks, ctx.sizes))
        grad_weight = None
        if x is not None and ctx.needs_input_grad[1]:
            if ctx.later is not None and ctx.later.is_asked_for:
                ctx.later.keep(gradient_pair(whole, x, ctx.is_transposed))
            else:
                grad_weight = weight_gradient(whole, x, ctx.is_transposed)
        return grad_x, grad_weight, None, None, None, None


def _gathered_product(
    grad: torch.Tensor, weight: torch.Tensor | None, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (*grad.shape[:-2], chunks.num_whole)
    whole = grad.new_empty((*shape, grad.shape[-1]))
    grad_x = None if weight is None else grad.new_empty((*shape, weight.shape[-1]))
    for span, pieces in chunks.gathered(grad):
        chunks.put(pieces, span, whole)
        if weight is not None and grad_x is not None:
            chunks.put(pieces @ weight, span, grad_x)
    return whole, grad_x


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Return the gradient of a linear layer's weight from the gradient of its output and its input."""
    left, right = gradient_pair(grad, x, is_transposed)
    return left.t() @ right


def gradient_pair(grad: torch.Tensor, x: torch.Tensor, is_transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of `weight_gradient`: `left` and `right` of `left.t() @ right`."""
    rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
    return (inputs, rows) if is_transposed else (rows, inputs)
