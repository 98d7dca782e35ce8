"""Matrix products on cubes of ranks: 3D tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .grid import TensorGrid, WeightLayout

# Note [3D]
# Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021. Of q*q*q ranks, the one
# at i, j, l along the axes weight, input and output multiplies panel X_il of the activations, sharded q ways along both
# dimensions, by panel W_jl of the weight (outputs, inputs), which gives a term of panel Y_ij of the output, a sum over
# l. X_il is needed at every j, so each of these ranks holds 1/q of its rows, and they all-gather it along j. Likewise
# W_jl is all-gathered along i. The sum over l is a reduce-scatter of rows. Backward is the same with other roles:
#     X^il = sum over j of Y^ij W_jl       W^jl = sum over i of Y^ij^T X_il
# So the output is laid out like the input with the axes input and output swapped, and the next layer swaps them back.
# Only biases are replicated: a rank holds 1/P of all other tensors. Gathered panels are gathered again in backward.


def cube_matmul(x: torch.Tensor, weight: torch.Tensor, grid: TensorGrid, *, is_second: bool) -> torch.Tensor:
    """Return this rank's block of the product of activations and the transpose of a weight; see Note [3D].

    Args:
        x: Block of the activations (rows, features).
        weight: Block of the weight (outputs, inputs).
        grid: Grid of the mode "3d".
        is_second: Whether the layer is the second one of a pair, for which the axes input and output swap roles.

    Collective: over the three axes of the grid, also in backward.
    """
    output: torch.Tensor = _Cube.apply(x, weight, grid, grid.shape.weight(is_second=is_second))  # type: ignore[no-untyped-call]
    return output


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
