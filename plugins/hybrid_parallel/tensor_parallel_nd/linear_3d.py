"""Linear layer on a 3D mesh of ranks: 3D tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from booster.comm import all_gather_equal, all_reduce_sum, start_reduce_scatter

from .mesh import BlockLayout, RankMesh

# Note [3D]
# Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021. Of q*q*q ranks, the one
# at i, j, l along the axes weight, input and output multiplies panel X_il of the activations, sharded q ways along both
# dimensions, by panel W_jl of the weight (outputs, inputs), which gives a term of panel Y_ij of the output, a sum over
# l. X_il is needed at every j, so each of these ranks holds 1/q of its rows, and they all-gather it along j. Likewise
# W_jl is all-gathered along i. The sum over l is a reduce-scatter of rows. Backward is the same with other roles:
#     X^il = sum over j of Y^ij W_jl       W^jl = sum over i of Y^ij^T X_il
# So the output is laid out like the input with the axes input and output swapped, and the next layer swaps them back.
# Only biases are replicated: a rank holds 1/P of all other tensors. Gathered panels are gathered again in backward.
# A bias is sharded along j and replicated on all ranks at one j, which reduce its gradient.
LINEAR_3D_ACTIVATIONS = BlockLayout((("weight", "input"), ("output",)))


@dataclass(frozen=True, slots=True)
class _AxisRoles:
    """Mesh, axis along which activations are all-gathered, and axis along which outputs are reduce-scattered."""

    mesh: RankMesh
    gathered: str
    summed: str


class Linear3D(nn.Module):
    """This rank's shard of a linear layer; see Note [3D].

    Collective over the world, as are its forward and backward.

    Args:
        linear: Unsharded layer; its values are copied.
        mesh: Result of `linear_3d_mesh`.
        is_second: If True, the input is the output of another such layer: the axes input and output swap roles.

    Raises:
        ConfigError: The layer's features are not divisible by the mesh sizes.
    """

    def __init__(self, linear: nn.Linear, mesh: RankMesh, *, is_second: bool = False) -> None:
        super().__init__()
        gathered, summed = ("output", "input") if is_second else ("input", "output")
        self._roles = _AxisRoles(mesh, gathered, summed)
        layout = BlockLayout(((gathered, "weight"), (summed,)))
        self.weight = nn.Parameter(mesh.block(linear.weight, layout, "a weight"))
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(mesh.block(bias, BlockLayout(((gathered,),)), "a bias"))
        for axes in ((gathered,), (summed,), ("weight",), ("weight", summed)):
            mesh.group(*axes)  # created now, as ranks do not run backward at the same time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block of the output; a first layer's input has the layout `LINEAR_3D_ACTIVATIONS`."""
        output: torch.Tensor = _Linear3DFunction.apply(x, self.weight, self.bias, self._roles)
        return output


class _Linear3DFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, roles: _AxisRoles
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.roles, ctx.has_bias = roles, bias is not None
        term = _all_gather_rows(x, roles.gathered, roles).mm(_all_gather_rows(weight, "weight", roles).t())
        output = _reduce_scatter_rows(term, roles.summed, roles)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        roles: _AxisRoles = ctx.roles
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            panel = _all_gather_rows(grad, roles.summed, roles)
        if ctx.needs_input_grad[0]:
            grad_x = _reduce_scatter_rows(panel.mm(_all_gather_rows(weight, "weight", roles)), roles.gathered, roles)
        if ctx.needs_input_grad[1]:
            grad_weight = _reduce_scatter_rows(
                panel.t().mm(_all_gather_rows(x, roles.gathered, roles)), "weight", roles
            )
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = all_reduce_sum(grad.sum(0), roles.mesh.group("weight", roles.summed))
        return grad_x, grad_weight, grad_bias, None


def _all_gather_rows(block: torch.Tensor, axis: str, roles: _AxisRoles) -> torch.Tensor:
    return all_gather_equal(block.detach(), roles.mesh.group(axis))


def _reduce_scatter_rows(term: torch.Tensor, axis: str, roles: _AxisRoles) -> torch.Tensor:
    total = term.new_empty(term.shape[0] // roles.mesh.sizes[axis], term.shape[1])
    start_reduce_scatter(term.view(-1), roles.mesh.group(axis)).wait(total.view(-1), accumulate=False)
    return total
