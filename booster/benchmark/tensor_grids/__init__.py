"""Linear layers with weights and activations sharded over 2D, 2.5D and 3D meshes of ranks."""

from booster.benchmark.tensor_grids.blocks import BlockLayout
from booster.benchmark.tensor_grids.cube import LINEAR_3D_ACTIVATIONS, Linear3D
from booster.benchmark.tensor_grids.grid import RankMesh, linear_3d_mesh, summa_mesh
from booster.benchmark.tensor_grids.layers import shard_mlp
from booster.benchmark.tensor_grids.summa import SUMMA_ACTIVATIONS, SummaLinear

__all__ = [
    "LINEAR_3D_ACTIVATIONS",
    "SUMMA_ACTIVATIONS",
    "BlockLayout",
    "Linear3D",
    "RankMesh",
    "SummaLinear",
    "linear_3d_mesh",
    "shard_mlp",
    "summa_mesh",
]
