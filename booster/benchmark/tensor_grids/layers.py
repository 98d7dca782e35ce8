"""Sharding of an MLP layer over a mesh."""

from __future__ import annotations

from torch import nn

from booster.benchmark.tensor_grids.cube import CubeLinear
from booster.benchmark.tensor_grids.grid import Grid
from booster.benchmark.tensor_grids.summa import SummaLinear

__all__ = ["divide_layer"]


def divide_layer(layer: nn.Module, grid: Grid, first: str = "up", second: str = "down") -> None:
    """Replace two consecutive linear layers of a module by this rank's shards of them.

    All other operations of the module must be elementwise: they see blocks of the activations, in the same layout
    before the first layer and after the second. Collective over the world.

    Args:
        layer: Module with the same weights on all ranks; changed in place.
        grid: Result of `summa_grid` or `cube_grid`.
        first: Name of the first linear layer.
        second: Name of the second linear layer.

    Raises:
        ConfigError: The features are not divisible by the mesh sizes.
    """
    for name, is_second in ((first, False), (second, True)):
        linear = getattr(layer, name)
        if "depth" in grid.sizes:
            setattr(layer, name, SummaLinear(linear, grid))
        else:
            setattr(layer, name, CubeLinear(linear, grid, is_second=is_second))
