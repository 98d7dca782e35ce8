"""Linear layers on a grid of ranks, and their matrix products: SUMMA on squares (2D, 2.5D), and cubes (3D).

As in one dimension, the layer's class is replaced by a subclass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from booster.comm import all_reduce_sum, broadcast, sum_dtype
from booster.core.opaque_operator import autocast_dtype, opaque
from booster.plugins.hybrid_parallel.tensor_parallel.dynamic_class import mixin_forward
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_transposed

from .grid import MAX_GATHERED_BYTES, TensorGrid, WeightLayout, assemble, divide, grid_of_number


@dataclass(frozen=True, slots=True)
class GridLinearConfig:
    """Settings of a linear layer.

    Attributes:
        grid: The grid.
        is_second: Whether it is the second layer of a pair.
        is_alone: Whether the pair is outside of stacks, so that the first layer divides its input, and the second one
            assembles its output.
        is_transposed: Whether the weight is (inputs, outputs).
    """

    grid: TensorGrid
    is_second: bool
    is_alone: bool
    is_transposed: bool

    def is_traceable(self, module: nn.Module) -> bool:
        """Whether torch.compile can trace the forward: that of a pair outside of stacks communicates in its course."""
        return not self.is_alone


def make_grid_linear(module: nn.Module, grid: TensorGrid, *, is_second: bool, is_alone: bool) -> None:
    """Make a linear layer multiply blocks of activations. Its weight and bias are this rank's blocks already.

    Args:
        module: An `nn.Linear` or a `Conv1D` of transformers.
        grid, is_second, is_alone: See `GridLinearConfig`.

    Collective: no; the module's forward and backward are, over the grid.
    """
    mixin_forward(module, GridLinear, GridLinearConfig(grid, is_second, is_alone, is_transposed(module)))


def grid_matmul(x: torch.Tensor, weight: torch.Tensor, grid: TensorGrid, *, is_second: bool) -> torch.Tensor:
    """Return this rank's block of the product of activations and the transpose of a weight.

    Args:
        x: Block of the activations (..., inputs).
        weight: Block of the weight (outputs, inputs).
        grid: The grid.
        is_second: Whether the layer is the second one of a pair, for which the axes of a cube swap roles.

    Collective: over the axes of the grid, also in backward; see Note [SUMMA] and Note [3D].
    """
    rows = x.reshape(-1, x.shape[-1])
    if grid.shape.mode == "3d":
        product = _Cube.apply(rows, weight, grid, grid.shape.weight(is_second=is_second))  # type: ignore[no-untyped-call]
    else:
        product = _Summa.apply(rows, weight, grid)  # type: ignore[no-untyped-call]
    return product.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def _multiply(number: int, is_second: bool, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return grid_matmul(x, weight, grid_of_number(number), is_second=is_second)


def _multiplied(number: int, is_second: bool, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    grid = grid_of_number(number)
    return x.new_empty((*x.shape[:-1], weight.shape[0] * (grid.side if grid.shape.mode == "3d" else 1)))


# The product of blocks of activations (..., inputs) and of a weight (outputs, inputs). Arguments: the group's number,
# whether the layer is the second one of a pair, and both.
_grid_matmul = opaque(_multiply, _multiplied)


class GridLinear(nn.Module):
    """Mixin of a linear layer on a grid."""

    _split: GridLinearConfig

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of the output, or all of it after a pair outside of stacks."""
        config, grid, dtype = self._split, self._split.grid, autocast_dtype(x)
        if config.is_alone and not config.is_second:
            if self.training:
                grid.tp_group.rng.enter()
            x = grid.tp_group.shared_input(x, torch.Tensor, lambda one: divide(one, grid))
        weight = cast(torch.Tensor, self.weight)
        weight = weight.t() if config.is_transposed else weight
        y: torch.Tensor = _grid_matmul(grid.tp_group.number, config.is_second, x.to(dtype), weight.to(dtype))
        bias = cast("torch.Tensor | None", self.bias)
        y = y if bias is None else y + bias.to(dtype)
        if config.is_alone and config.is_second:
            grid.tp_group.rng.leave()
            return assemble(y, grid)
        return y

    traced_forward = forward


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


# Note [3D]
# Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021. Of q*q*q ranks, the one
# at i, j, l along the axes weight, input and output multiplies panel X_il of the activations, sharded q ways along both
# dimensions, by panel W_jl of the weight (outputs, inputs), which gives a term of panel Y_ij of the output, a sum over
# l. X_il is needed at every j, so each of these ranks holds 1/q of its rows, and they all-gather it along j. Likewise
# W_jl is all-gathered along i. The sum over l is a reduce-scatter of rows. Backward is the same with other roles:
#     X^il = sum over j of Y^ij W_jl       W^jl = sum over i of Y^ij^T X_il
# So the output is laid out like the input with the axes input and output swapped, and the next layer swaps them back.
# Only biases are replicated: a rank holds 1/P of all other tensors. Gathered panels are gathered again in backward.


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, grid: TensorGrid, layout: WeightLayout
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.layout = grid, layout
        panel = grid.gather(weight, "weight")
        term = grid.gather_input(x, layout.outputs).mm(panel.t())
        return grid.reduce_scatter(term, layout.inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grid: TensorGrid = ctx.grid
        layout: WeightLayout = ctx.layout
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            panel = grid.gather(grad, layout.inputs)
        if ctx.needs_input_grad[0]:
            grad_x = grid.reduce_scatter(panel.mm(grid.gather(weight, "weight")), layout.outputs)
        if ctx.needs_input_grad[1]:
            term = panel.t().mm(grid.gather_input(x, layout.outputs))
            grad_weight = grid.reduce_scatter(term, "weight")
        return grad_x, grad_weight, None, None
