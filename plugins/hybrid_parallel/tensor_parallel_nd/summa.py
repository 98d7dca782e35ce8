"""Matrix products on squares of ranks: 2D tensor parallelism (SUMMA), and 2.5D (Tesseract) with several squares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from booster.comm import all_reduce_sum, broadcast, sum_dtype

from .grid import MAX_GATHERED_BYTES, TensorGrid

# Note [SUMMA]
# 2D: Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models", 2021. 2.5D: Wang et al.,
# "Tesseract: Parallelize the Tensor Parallelism Efficiently", 2021. Of q*q ranks, the one in row i and column j holds
# the blocks X_ij of the activations (rows, features) and W_ji of the weight (outputs, inputs), both sharded q ways in
# both dimensions. With Y the output and an upper index for gradients:
#     Y_ij  = sum over k of X_ik W_jk^T    X_ik is broadcast along row i, W_jk along column j
#     X^ik  = sum over j of Y^ij W_jk      W_jk is broadcast along column j, the sum is over row i
#     W^jk  = sum over i of Y^ij^T X_ik    X_ik is broadcast along row i, the sum is over column j
# Each broadcast transfers one block at a time, so that no rank ever holds a full row of large blocks; small ones are
# all-gathered at once, in the same bytes. The q sums of a gradient, one for each rank, are one reduce-scatter: the same
# bytes as q reductions, with q blocks held at once.
# 2.5D: `depth` such squares hold the same weights and different rows of the activations; gradients of weights are
# all-reduced over the squares.
# Bytes received in forward: (q-1)/q of a row of blocks of X and of a column of blocks of W. In backward twice that:
# the same broadcasts again, as blocks are not kept, and as much for the sums; plus the all-reduce over the squares.


def summa_matmul(x: torch.Tensor, weight: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    """Return this rank's block of the product of activations and the transpose of a weight; see Note [SUMMA].

    Args:
        x: Block of the activations (rows, features).
        weight: Block of the weight (outputs, inputs).
        grid: Grid of the mode "2d" or "2.5d".

    Collective: over the row and the column of the grid, also in backward, there over its depth, too.
    """
    output: torch.Tensor = _Summa.apply(x, weight, grid)  # type: ignore[no-untyped-call]
    return output


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        output = x.new_zeros(x.shape[0], weight.shape[0], dtype=sum_dtype(x.dtype))
        for block, other in zip(_input_blocks(x, grid), _blocks(weight, "row", grid), strict=True):
            if output.dtype == x.dtype:
                output.addmm_(block, other.t())
            else:
                output.add_(block.mm(other.t()))
        return output.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grid: TensorGrid = ctx.grid
        grad = grad.contiguous()
        # Functions, so that the terms of one gradient are freed before those of the other are allocated.
        grad_x = _input_gradient(grad, weight, grid) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(grad, x, grid) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _input_blocks(x: torch.Tensor, grid: TensorGrid) -> Iterator[torch.Tensor]:
    if grid.side * x.nbytes > MAX_GATHERED_BYTES:
        return _blocks(x, "column", grid)
    return iter(grid.gather_input(x, "column").unflatten(0, (grid.side, -1)))


def _blocks(block: torch.Tensor, axis: str, grid: TensorGrid) -> Iterator[torch.Tensor]:
    """Yield the blocks of the ranks along an axis: those of one row differ in their column, and the other way round."""
    if grid.side * block.nbytes <= MAX_GATHERED_BYTES:
        yield from grid.gather(block, axis).unflatten(0, (grid.side, -1))
        return
    block = block.detach().contiguous()
    for source in range(grid.side):
        received = block if grid.coordinates[axis] == source else torch.empty_like(block)
        broadcast([received], grid.group(axis), source)
        yield received


def _input_gradient(grad: torch.Tensor, weight: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    terms = grad.new_empty(grid.side, grad.shape[0], weight.shape[1])
    for block, term in zip(_blocks(weight, "row", grid), terms, strict=True):
        torch.mm(grad, block, out=term)
    return grid.reduce_scatter(terms, "column")[0]


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    terms = grad.new_empty(grid.side, grad.shape[1], x.shape[1])
    for block, term in zip(_input_blocks(x, grid), terms, strict=True):
        torch.mm(grad.t(), block, out=term)
    total = grid.reduce_scatter(terms, "row")[0]
    if grid.shape.depth == 1:
        return total
    return all_reduce_sum(total.to(sum_dtype(total.dtype)), grid.group("depth")).to(total.dtype)
