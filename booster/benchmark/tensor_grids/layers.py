"""An MLP layer divided over a grid."""

from __future__ import annotations

from torch import nn

from booster.benchmark.tensor_grids.cube import CubeLinear
from booster.benchmark.tensor_grids.grid import Grid
from booster.benchmark.tensor_grids.summa import SummaLinear

__all__ = ["divide_layer"]


def divide_layer(layer: nn.Module, grid: Grid, first: str = "up", second: str = "down") -> None:
    """Puts this rank's parts in the places of two linear layers of a module, of which one follows the other.

    What the module does elsewhere must be elementwise: it sees blocks of the activations, which are cut alike before
    the first layer and behind the second. Collective over the world.

    Args:
        layer: The module, with the same numbers on all ranks; changed in place.
        grid: From `summa_grid` or `cube_grid`.
        first: Name of the first linear layer.
        second: Name of the second one.

    Raises:
        ConfigError: The grid does not divide the features.
    """
    for name, is_second in ((first, False), (second, True)):
        linear = getattr(layer, name)
        if "depth" in grid.sizes:
            setattr(layer, name, SummaLinear(linear, grid))
        else:
            setattr(layer, name, CubeLinear(linear, grid, is_second=is_second))
