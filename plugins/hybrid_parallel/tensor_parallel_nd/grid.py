"""Grids of tensor-parallel ranks: axes, division of activations and weights over them, and process groups."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from booster.comm import all_gather_equal, start_reduce_scatter
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.mesh import HybridMesh
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.mappings import copy_to_tp_region

MAX_GATHERED_BYTES = 2**24
"""Size of blocks that are gathered at once and kept, rather than one by one."""

GRID_MODES = ("2d", "2.5d", "3d")
"""Modes of tensor parallelism on a grid of ranks; the other one is "1d"."""

# Note [Grids of tensor-parallel ranks]
# In the mode "1d" all ranks hold the same activations between the layers. In the others activations (batch, ...,
# features) are blocks: the examples of a batch are divided over some axes of the grid, the features over another one.
#   2d:   rows x columns. Examples are divided over rows, features over columns.
#   2.5d: depth x rows x columns. Examples are divided over depth and rows, features over columns.
#   3d:   output x input x weight. Examples are divided over weight and input, features over output.
# A plan says for all modes alike which linear layers are pairs: the first one of a pair (column-parallel in the mode
# "1d") computes what the second one (row-parallel) reads, in units such as attention heads. Between the two of a pair
# the ranks hold the *inner* layout, elsewhere the *outer* one. In the mode "3d" they differ: a layer exchanges the
# roles of the axes input and output. In the other modes they are the same.
# A rank's weight has outputs of the features that it holds of the result, and inputs of those that it holds of X,
# in the mode "2d" transposed, as each rank multiplies all blocks of its row and its column; see Note [SUMMA].
# Activations are divided within a stack of layers, and within a pair of linear layers outside of stacks. Elsewhere (in
# embeddings, output heads, losses) all ranks hold all of them, and vocabularies are divided over all ranks of the grid,
# as in the mode "1d". The examples need not be divisible: the last one is repeated, and its copies are dropped again.


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """Axes over which activations are divided.

    Attributes:
        batch: Axes of the examples, the outermost first.
        features: Axis of the features.
    """

    batch: tuple[str, ...]
    features: str


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Axes over which a weight is divided.

    Attributes:
        outputs: Axis of the output features.
        rows: Axis over which the outputs of one rank of that axis are divided again, or None.
        inputs: Axis of the input features.
    """

    outputs: str
    rows: str | None
    inputs: str


@dataclass(frozen=True, slots=True)
class TensorGridShape:
    """Arrangement of tensor-parallel ranks in a grid; consecutive ranks differ along the last axis.

    Attributes:
        mode: One of `GRID_MODES`.
        side: Number of ranks along each axis but depth.
        depth: Number of ranks along the axis depth.
    """

    mode: str
    side: int
    depth: int = 1

    @classmethod
    def of(cls, mode: str, num_ranks: int, depth: int | None = None) -> TensorGridShape:
        """Return the grid of a number of ranks.

        Args:
            mode: One of `GRID_MODES`.
            num_ranks: Number of tensor-parallel ranks.
            depth: Number of ranks along the axis depth, for the mode "2.5d".

        Raises:
            ConfigError: The ranks do not form such a grid.
        """
        if mode == "2.5d" and depth is None:
            raise ConfigError(
                f"tp_mode='2.5d' with tp_size={num_ranks} has no depth: give tp_depth, the number of squares of ranks,"
                " such as tp_size=8, tp_depth=2 for two squares of 2 x 2"
            )
        depth = 1 if depth is None else depth
        power = 3 if mode == "3d" else 2
        side = round((num_ranks / depth) ** (1 / power))
        if depth * side**power != num_ranks:
            rule = {"2d": "q * q", "2.5d": f"{depth} * q * q", "3d": "q * q * q"}[mode]
            below = max(2, math.floor((num_ranks / depth) ** (1 / power)))
            possible = [depth * size**power for size in (below, below + 1)]
            raise ConfigError(
                f"tp_mode={mode!r} arranges {rule} ranks, which tp_size={num_ranks} is not: use tp_size={possible[0]}"
                f" or {possible[1]}, or another mode"
            )
        if side == 1:
            raise ConfigError(
                f"tp_mode={mode!r} with tp_size={num_ranks} and tp_depth={depth} has squares of one rank, which"
                " divide no layer: use fewer of more ranks, or data parallelism, which divides the examples as well"
            )
        return cls(mode, side, depth)

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each axis, the outermost first."""
        if self.mode == "3d":
            return dict.fromkeys(("output", "input", "weight"), self.side)
        square = {"row": self.side, "column": self.side}
        return square if self.mode == "2d" else {"depth": self.depth, **square}

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def outer(self) -> ActivationLayout:
        """Layout of activations between pairs of linear layers."""
        if self.mode == "3d":
            return ActivationLayout(("weight", "input"), "output")
        return ActivationLayout(("row",) if self.mode == "2d" else ("depth", "row"), "column")

    @property
    def inner(self) -> ActivationLayout:
        """Layout of activations between the two linear layers of a pair."""
        return ActivationLayout(("weight", "output"), "input") if self.mode == "3d" else self.outer

    def weight(self, *, is_second: bool) -> WeightLayout:
        """Return the layout of the weight of the first or the second linear layer of a pair."""
        read, written = (self.inner, self.outer) if is_second else (self.outer, self.inner)
        if self.mode == "3d":
            return WeightLayout(outputs=written.features, rows="weight", inputs=read.features)
        return WeightLayout(outputs=written.features, rows=None, inputs="row")

    @property
    def num_batch_shards(self) -> int:
        """Number of ranks among which the examples are divided."""
        return math.prod(self.axes[axis] for axis in self.outer.batch)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank."""
        axes, found = self.axes, {}
        for axis in reversed(axes):
            rank, found[axis] = divmod(rank, axes[axis])
        return {axis: found[axis] for axis in axes}

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Return the index of a rank among the combinations of its coordinates along axes, the first one outermost."""
        coordinates, index = self.coordinates(rank), 0
        for axis in axes:
            index = index * self.axes[axis] + coordinates[axis]
        return index


_by_number: weakref.WeakValueDictionary[int, TensorGrid] = weakref.WeakValueDictionary()


def grid_of_number(number: int) -> TensorGrid:
    """Return the grid of a tensor-parallel group's number, for operators, which take no objects."""
    return _by_number[number]


class TensorGrid:
    """The tensor-parallel ranks of this process in their grid, with the process groups along its axes.

    Args:
        shape: Arrangement of the ranks.
        tp_group: The group of all of them.
        mesh: The device mesh, which has the axes of the grid in place of tp.

    Attributes:
        shape: As given.
        tp_group: As given.
        side: Number of ranks along each axis but depth.
        num_batch_shards: Number of ranks among which the examples are divided.
        coordinates: Coordinates of this rank.
        outer_index: Index of this rank's examples among them in the outer layout.
        inner_index: The same in the inner layout.
        num_local: Number of examples of each rank, by the number of examples of every batch so far.

    Collective: yes, over the world.
    """

    def __init__(self, shape: TensorGridShape, tp_group: TensorParallelGroup, mesh: HybridMesh) -> None:
        self.shape = shape
        self.tp_group = tp_group
        self.side = shape.side
        self.num_batch_shards = shape.num_batch_shards
        self.coordinates: Mapping[str, int] = shape.coordinates(tp_group.rank)
        self.outer_index = shape.index(tp_group.rank, shape.outer.batch)
        self.inner_index = shape.index(tp_group.rank, shape.inner.batch)
        # All of them now, as ranks do not run backward at the same time.
        lines = [*((axis,) for axis in shape.axes), shape.outer.batch, shape.inner.batch]
        self._groups = {axes: mesh.group(*axes) for axes in lines}
        self.num_local: dict[int, int] = {}
        self._batches: dict[int, int] = {}
        _by_number[tp_group.number] = self

    def __deepcopy__(self, memo: dict[int, object]) -> TensorGrid:
        return self

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one along these axes only."""
        return self._groups[axes]

    def gather(self, block: torch.Tensor, axis: str) -> torch.Tensor:
        """Return the blocks of the ranks along an axis, concatenated. Collective over the group of the axis."""
        return all_gather_equal(block.detach().contiguous(), self.group(axis))

    def reduce_scatter(self, terms: torch.Tensor, axis: str) -> torch.Tensor:
        """Return this rank's equal part of the first dimension of the sum over an axis. Collective over its group."""
        total = terms.new_empty(terms.shape[0] // self.side, *terms.shape[1:])
        start_reduce_scatter(terms.view(-1), self.group(axis)).wait(total.view(-1), accumulate=False)
        return total

    def gather_input(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """Return `gather` of the input of a linear layer, if it is small once for all layers that read it.

        Query, key and value projections read one tensor. What was gathered for the last one is kept until another
        input is gathered, and at most until the end of the forward or backward.

        Collective: over the group of the axis, with the same inputs in the same order on all of its ranks.
        """
        x = x.detach()
        if x.is_inference() or self.side * x.nbytes > MAX_GATHERED_BYTES:
            return self.gather(x, axis)
        memory = x.untyped_storage()._cdata, x.storage_offset()  # of fake tensors, too, which have no address
        key = memory, x.shape, x.stride(), x._version, axis
        kept = self.tp_group.gathered
        if kept is None or kept[0] != key:
            kept = self.tp_group.gathered = (key, x, self.gather(x, axis))  # x, as its memory must not be used again
        return kept[2]

    def begin_batch(self, num_examples: int) -> None:
        """Note the number of examples of activations that are divided."""
        self.num_local[num_examples] = -(-num_examples // self.num_batch_shards)
        self._batches[self.num_local[num_examples]] = num_examples

    def num_examples(self, num_local: int) -> int:
        """Return the number of examples of the last activations of which each rank has `num_local`."""
        return self._batches.get(num_local, num_local * self.num_batch_shards)


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
    return examples_of(copy_to_tp_region(x, grid.tp_group), grid.num_batch_shards, grid.inner_index)


def examples_of(x: torch.Tensor, num_shards: int, index: int) -> torch.Tensor:
    """Return the examples of one of `num_shards` ranks; the last one is repeated for equally many on all ranks."""
    num_local = -(-x.shape[0] // num_shards)
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
        block = _features(examples_of(x, grid.num_batch_shards, grid.outer_index), grid)
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
