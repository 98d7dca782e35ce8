"""Linear layers with weights and activations sharded over 2D, 2.5D and 3D meshes of ranks."""

from booster.benchmark.tensor_grids.blocks import Layout
from booster.benchmark.tensor_grids.cube import CUBE_ACTIVATIONS, CubeLinear
from booster.benchmark.tensor_grids.grid import Grid, cube_grid, summa_grid
from booster.benchmark.tensor_grids.layers import divide_layer
from booster.benchmark.tensor_grids.summa import SUMMA_ACTIVATIONS, SummaLinear

__all__ = [
    "CUBE_ACTIVATIONS",
    "SUMMA_ACTIVATIONS",
    "CubeLinear",
    "Grid",
    "Layout",
    "SummaLinear",
    "cube_grid",
    "divide_layer",
    "summa_grid",
]
