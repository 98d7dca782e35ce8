"""Chunked matmul and reduce-scatter of row-parallel layers; see Note [Collective matmul]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from booster.plugins.hybrid_parallel.tensor_parallel.chunks import ChunkRange, TokenChunks
from booster.plugins.hybrid_parallel.tensor_parallel.later_gradients import DeferredWGrad
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.regions import all_gather_shards

__all__ = ["matmul_reduce_scatter", "weight_gradient", "weight_gradient_operands"]


def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    tp_group: TensorParallelGroup,
    sizes: Sequence[int],
    *,
    is_transposed: bool,
    deferred: DeferredWGrad | None = None,
) -> torch.Tensor:
    """Return the reduce-scatter of `x @ weight.t()` over the tokens, like `reduce_scatter_shards` of that product.

    Args:
        x: Input with tokens in the second to last dimension, the same number on all ranks, and features last.
        weight: Weight (outputs, inputs).
        tp_group: The tensor-parallel group.
        sizes: Number of tokens of each rank, not all 0.
        is_transposed: If True, the weight is (inputs, outputs).
        deferred: The weight's deferrable gradient; optional, defaults to computing it in backward.

    Collective: in forward and backward.
    """
    y: torch.Tensor = _MatmulReduceScatter.apply(x, weight, tp_group, tuple(sizes), is_transposed, deferred)  # type: ignore[no-untyped-call]
    return y


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        tp_group: TensorParallelGroup,
        sizes: tuple[int, ...],
        is_transposed: bool,
        deferred: DeferredWGrad | None,
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.ranks, ctx.sizes, ctx.is_transposed, ctx.later = tp_group, sizes, is_transposed, deferred
        chunks = TokenChunks(tp_group, sizes)
        matrix = weight.t() if is_transposed else weight

        def product(chunk: ChunkRange) -> torch.Tensor:
            return nn.functional.linear(chunks.read(x, chunk), matrix)

        y, finish = chunks.reduce_scatter(product, x, matrix.shape[0])
        finish()
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if weight is not None and ctx.is_transposed:
            weight = weight.t()
        if torch.is_grad_enabled():
            full = all_gather_shards(grad, ctx.ranks, grad.dim() - 2, ctx.sizes)
            grad_x = None if weight is None else full @ weight
        else:
            full, grad_x = _all_gather_matmul(grad, weight, TokenChunks(ctx.ranks, ctx.sizes))
        grad_weight = None
        if x is not None and ctx.needs_input_grad[1]:
            if ctx.later is not None and ctx.later.should_defer:
                ctx.later.keep(weight_gradient_operands(full, x, ctx.is_transposed))
            else:
                grad_weight = weight_gradient(full, x, ctx.is_transposed)
        return grad_x, grad_weight, None, None, None, None


def _all_gather_matmul(
    grad: torch.Tensor, weight: torch.Tensor | None, chunks: TokenChunks
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (*grad.shape[:-2], chunks.num_total)
    full = grad.new_empty((*shape, grad.shape[-1]))
    grad_x = None if weight is None else grad.new_empty((*shape, weight.shape[-1]))
    for chunk, shards in chunks.all_gather(grad):
        chunks.write(shards, chunk, full)
        if weight is not None and grad_x is not None:
            chunks.write(shards @ weight, chunk, grad_x)
    return full, grad_x


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Return the gradient of a linear layer's weight from the gradient of its output and its input."""
    left, right = weight_gradient_operands(grad, x, is_transposed)
    return left.t() @ right


def weight_gradient_operands(
    grad: torch.Tensor, x: torch.Tensor, is_transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of `weight_gradient`: `left` and `right` of `left.t() @ right`."""
    rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
    return (inputs, rows) if is_transposed else (rows, inputs)
