"""Linear layers with weights and activations sharded over 2D, 2.5D and 3D meshes of ranks."""

from __future__ import annotations

from torch import nn

from .linear_3d import LINEAR_3D_ACTIVATIONS, Linear3D
from .mesh import BlockLayout, RankMesh, linear_3d_mesh, summa_mesh
from .summa import SUMMA_ACTIVATIONS, SummaLinear

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


def shard_mlp(layer: nn.Module, mesh: RankMesh, first: str = "up", second: str = "down") -> None:
    """Replace two consecutive linear layers of a module by this rank's shards of them.

    All other operations of the module must be elementwise: they see blocks of the activations, in the same layout
    before the first layer and after the second. Collective over the world.

    Args:
        layer: Module with the same weights on all ranks; changed in place.
        mesh: Result of `summa_mesh` or `linear_3d_mesh`.
        first: Name of the first linear layer.
        second: Name of the second linear layer.

    Raises:
        ConfigError: The features are not divisible by the mesh sizes.
    """
    for name, is_second in ((first, False), (second, True)):
        linear = getattr(layer, name)
        if "depth" in mesh.sizes:
            setattr(layer, name, SummaLinear(linear, mesh))
        else:
            setattr(layer, name, Linear3D(linear, mesh, is_second=is_second))
