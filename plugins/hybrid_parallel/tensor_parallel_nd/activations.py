"""Blocks of activations: division of what all ranks of a grid hold, and its inverse."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from booster.comm import all_gather_equal
from booster.plugins.hybrid_parallel.tensor_parallel.mappings import copy_to_tp_region

from .grid import TensorGrid


def divide(x: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    """Return this rank's block of activations, in the outer layout.

    Args:
        x: Activations (batch, ..., features) that are equal on all ranks.
        grid: The grid.

    Collective: in backward, which assembles the gradient.
    """
    grid.begin_batch(x.shape[0])
    block: torch.Tensor = _Divide.apply(x, grid)  # type: ignore[no-untyped-call]
    return block


def assemble(block: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    """Return the activations of which each rank has a block in the outer layout, on all ranks.

    Collective: yes, but not in backward, which takes this rank's block of the gradient.
    """
    full: torch.Tensor = _Assemble.apply(block, grid, grid.num_examples(block.shape[0]))  # type: ignore[no-untyped-call]
    return full


def own_examples(x: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    """Return this rank's examples, in the inner layout, of an argument that is equal on all ranks, such as a mask.

    Args:
        x: Tensor with the examples in dim 0.
        grid: The grid.

    Collective: in backward, which all-reduces the gradient, if there is one.
    """
    return _own_examples(copy_to_tp_region(x, grid.tp_group), grid, grid.inner_index)


def _own_examples(x: torch.Tensor, grid: TensorGrid, index: int) -> torch.Tensor:
    """Return a rank's examples; the last one is repeated for equally many on all ranks."""
    num_local = -(-x.shape[0] // grid.num_batch_shards)
    start = index * num_local
    if start + num_local <= x.shape[0]:
        return x[start : start + num_local]
    return x[torch.arange(start, start + num_local, device=x.device).clamp_(max=x.shape[0] - 1)]


def _features(x: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    return x.chunk(grid.side, dim=-1)[grid.coordinates[grid.shape.outer.features]]


def _gather_blocks(block: torch.Tensor, grid: TensorGrid, num_examples: int) -> torch.Tensor:
    shape, layout = grid.shape, grid.shape.outer
    blocks = all_gather_equal(block.contiguous(), grid.tp_group.group).unflatten(0, (shape.num_ranks, -1))
    order = sorted(range(shape.num_ranks), key=lambda rank: shape.index(rank, (*layout.batch, layout.features)))
    if order != list(range(shape.num_ranks)):
        blocks = blocks[torch.tensor(order, device=blocks.device)]
    blocks = blocks.unflatten(0, (grid.num_batch_shards, grid.side)).movedim(1, -2).flatten(-2).flatten(0, 1)
    full: torch.Tensor = blocks[:num_examples]
    return full


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
        ctx.grid, ctx.num_examples = grid, x.shape[0]
        block = _features(_own_examples(x, grid, grid.outer_index), grid)
        return block.clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The copies of the last example are dropped: what follows drops them, too, so that they have no gradient.
        return _gather_blocks(grad, ctx.grid, ctx.num_examples), None


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, grid: TensorGrid, num_examples: int) -> torch.Tensor:
        ctx.grid, ctx.num_local = grid, block.shape[0]
        return _gather_blocks(block, grid, num_examples)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grid: TensorGrid = ctx.grid
        start = grid.outer_index * ctx.num_local
        own = _features(grad[start : start + ctx.num_local], grid)
        block = own.new_zeros(ctx.num_local, *own.shape[1:])
        block[: own.shape[0]] = own
        return block, None, None
