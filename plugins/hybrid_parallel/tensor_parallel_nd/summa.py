"""Linear layer on 2D meshes of ranks: 2D tensor parallelism (SUMMA), and 2.5D (Tesseract) with several meshes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from booster.comm import all_reduce_sum, broadcast, start_reduce_scatter

from .mesh import BlockLayout, RankMesh

# Note [SUMMA]
# 2D: Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models", 2021. 2.5D: Wang et al.,
# "Tesseract: Parallelize the Tensor Parallelism Efficiently", 2021. Of q*q ranks, the one in row i and column j holds
# the blocks X_ij of the activations (rows, features) and W_ji of the weight (outputs, inputs), both sharded q ways in
# both dimensions. With Y the output and an upper index for gradients:
#     Y_ij  = sum over k of X_ik W_jk^T    X_ik is broadcast along row i, W_jk along column j
#     X^ik  = sum over j of Y^ij W_jk      W_jk is broadcast along column j, the sum is over row i
#     W^jk  = sum over i of Y^ij^T X_ik    X_ik is broadcast along row i, the sum is over column j
# Each broadcast transfers one block at a time, so that no rank ever holds a full row of blocks. The q sums of a
# gradient, one for each rank, are one reduce-scatter: the same bytes as q reductions, with q blocks held at once.
# 2.5D: `depth` such meshes hold the same weights and different rows of the activations; gradients of weights are
# all-reduced over the meshes. A bias is sharded by columns and replicated in a column, whose ranks reduce its gradient.
# Bytes received in forward: (q-1)/q of a row of blocks of X and of a column of blocks of W. In backward twice that:
# the same broadcasts again, as blocks are not kept, and as much for the sums; plus the all-reduce over the meshes.
SUMMA_ACTIVATIONS = BlockLayout((("depth", "row"), ("column",)))
_WEIGHT = BlockLayout((("column",), ("row",)))
_BIAS = BlockLayout((("column",),))


class SummaLinear(nn.Module):
    """This rank's shard of a linear layer; see Note [SUMMA].

    Collective over the world, as are its forward and backward.

    Args:
        linear: Unsharded layer; its values are copied.
        mesh: Result of `summa_mesh`.

    Raises:
        ConfigError: The layer's features are not divisible by the mesh sizes.
    """

    def __init__(self, linear: nn.Linear, mesh: RankMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self.weight = nn.Parameter(mesh.block(linear.weight, _WEIGHT, "a weight"))
        self.bias = None if linear.bias is None else nn.Parameter(mesh.block(linear.bias, _BIAS, "a bias"))
        for axes in (("row",), ("column",), ("depth",), ("depth", "row")):
            mesh.group(*axes)  # created now, as ranks do not run backward at the same time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block of the output for the block of the activations, both laid out as `SUMMA_ACTIVATIONS`."""
        output: torch.Tensor = _SummaFunction.apply(x, self.weight, self.bias, self._mesh)
        return output


class _SummaFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mesh: RankMesh
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.has_bias = mesh, bias is not None
        output = x.new_zeros(x.shape[0], weight.shape[0]) if bias is None else bias.repeat(x.shape[0], 1)
        for step in range(mesh.sizes["row"]):
            output.addmm_(_broadcast_block(x, step, "column", mesh), _broadcast_block(weight, step, "row", mesh).t())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mesh: RankMesh = ctx.mesh
        grad = grad.contiguous()
        # Functions, so that the terms of one gradient are freed before those of the other are allocated.
        grad_x = _input_gradient(grad, weight, mesh) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(grad, x, mesh) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = all_reduce_sum(grad.sum(0), mesh.group("depth", "row"))
        return grad_x, grad_weight, grad_bias, None


def _broadcast_block(block: torch.Tensor, source: int, axis: str, mesh: RankMesh) -> torch.Tensor:
    """Broadcast along a mesh axis: the ranks of one row differ in their column, and the other way round."""
    block = block.detach().contiguous()
    received = block if mesh.coordinates[axis] == source else torch.empty_like(block)
    broadcast([received], mesh.group(axis), source)
    return received


def _input_gradient(grad: torch.Tensor, weight: torch.Tensor, mesh: RankMesh) -> torch.Tensor:
    terms = grad.new_empty(mesh.sizes["column"], grad.shape[0], weight.shape[1])
    for step, term in enumerate(terms):
        torch.mm(grad, _broadcast_block(weight, step, "row", mesh), out=term)
    return _reduce_scatter_terms(terms, "column", mesh)


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, mesh: RankMesh) -> torch.Tensor:
    terms = grad.new_empty(mesh.sizes["row"], grad.shape[1], x.shape[1])
    for step, term in enumerate(terms):
        torch.mm(grad.t(), _broadcast_block(x, step, "column", mesh), out=term)
    return all_reduce_sum(_reduce_scatter_terms(terms, "row", mesh), mesh.group("depth"))


def _reduce_scatter_terms(terms: torch.Tensor, axis: str, mesh: RankMesh) -> torch.Tensor:
    total = torch.empty_like(terms[0])
    start_reduce_scatter(terms.view(-1), mesh.group(axis)).wait(total.view(-1), accumulate=False)
    return total
