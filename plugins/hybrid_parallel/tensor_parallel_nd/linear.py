"""Linear layers on a grid of ranks; as in one dimension, the layer's class is replaced by a subclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from booster.core.opaque_operator import autocast_dtype, opaque
from booster.plugins.hybrid_parallel.tensor_parallel.dynamic_class import mixin_forward
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_transposed

from .activations import assemble, divide
from .cube import cube_matmul
from .grid import TensorGrid, grid_of_number
from .summa import summa_matmul


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

    def prepare_input(self, x: torch.Tensor, *, is_training: bool) -> torch.Tensor:
        """Return this rank's block of the input."""
        if self.is_second or not self.is_alone:
            return x
        if is_training:
            self.grid.tp_group.rng.enter()
        return self.grid.tp_group.shared_input(x, torch.Tensor, lambda one: divide(one, self.grid))

    def is_traceable(self, module: nn.Module) -> bool:
        """Whether torch.compile can trace the forward: that of a pair outside of stacks communicates in its course."""
        return not self.is_alone

    def finish_output(self, y: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        if not (self.is_second and self.is_alone):
            return y
        self.grid.tp_group.rng.leave()
        return assemble(y, self.grid)


def make_grid_linear(module: nn.Module, grid: TensorGrid, *, is_second: bool, is_alone: bool) -> None:
    """Make a linear layer multiply blocks of activations. Its weight and bias are this rank's blocks already.

    Args:
        module: An `nn.Linear` or a `Conv1D` of transformers.
        grid, is_second, is_alone: See `GridLinearConfig`.

    Collective: no; the module's forward and backward are, over the grid.
    """
    mixin_forward(module, GridLinear, GridLinearConfig(grid, is_second, is_alone, is_transposed(module)))


def _multiply(number: int, is_second: bool, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    grid, rows = grid_of_number(number), x.reshape(-1, x.shape[-1])
    if grid.shape.mode == "3d":
        product = cube_matmul(rows, weight, grid, is_second=is_second)
    else:
        product = summa_matmul(rows, weight, grid)
    return product.view(*x.shape[:-1], -1)


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
        config, dtype = self._split, autocast_dtype(x)
        x = config.prepare_input(x, is_training=self.training)
        weight = cast(torch.Tensor, self.weight)
        weight = weight.t() if config.is_transposed else weight
        y: torch.Tensor = _grid_matmul(config.grid.tp_group.number, config.is_second, x.to(dtype), weight.to(dtype))
        bias = cast("torch.Tensor | None", self.bias)
        return config.finish_output(y if bias is None else y + bias.to(dtype))

    traced_forward = forward
