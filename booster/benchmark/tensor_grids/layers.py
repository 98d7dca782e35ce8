"""Sharding of an MLP layer over a mesh."""

from __future__ import annotations

from torch import nn

from booster.benchmark.tensor_grids.cube import Linear3D
from booster.benchmark.tensor_grids.grid import RankMesh
from booster.benchmark.tensor_grids.summa import SummaLinear

__all__ = ["shard_mlp"]


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
