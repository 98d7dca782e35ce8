"""Groups of ranks of ColossalAI's parallel modes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from booster.errors import ConfigError
from booster.validation import check_count

from .mesh import rank_groups

# Axes that replace the tensor axis in each mode, from the outermost, and the axes along which each group lies. Rank
# (i, j) of a 2D mesh is in row i and column j; a row's ranks differ in their column. 3D: rank (k, j, i) gathers inputs
# along j and weights along i, and reduces outputs along k.
_MESHES: Mapping[str | None, tuple[str, ...]] = {
    None: ("tensor",),
    "1d": ("tensor",),
    "sequence": ("tensor",),
    "2d": ("i", "j"),
    "2.5d": ("depth", "i", "j"),
    "3d": ("k", "j", "i"),
}
_GROUPS: Mapping[str | None, Mapping[str, tuple[str, ...]]] = {
    "1d": {"1d": ("tensor",)},
    "sequence": {"sequence": ("tensor",), "sequence_dp": ("data", "tensor")},
    "2d": {"2d_row": ("j",), "2d_col": ("i",)},
    "2.5d": {"2p5d_row": ("j",), "2p5d_col": ("i",), "2p5d_dep": ("depth",), "2p5d_xz": ("depth", "j")},
    "3d": {"3d_input": ("j",), "3d_weight": ("i",), "3d_output": ("k",)},
}


def parallel_groups(
    world_size: int, *, pipeline: int = 1, tensor: int = 1, mode: str | None = None, depth: int = 1
) -> dict[str, list[list[int]]]:
    """Return the groups of ranks of every parallel mode of a ColossalAI configuration. No communication.

    Data-parallel ranks are the farthest apart, then pipeline stages, then tensor-parallel ranks, which are consecutive:
    the mesh of `HybridParallelPlugin`, whose axes are dp, pp and tp.

    Args:
        world_size: Number of ranks.
        pipeline: Number of pipeline stages.
        tensor: Number of tensor-parallel ranks.
        mode: "1d", "2d", "2.5d", "3d" or "sequence"; optional with one tensor-parallel rank.
        depth: Number of 2D meshes of the mode "2.5d".

    Returns:
        Groups by the names of ColossalAI's `ParallelMode`: "global", "data", "pipeline", "model", "tensor", and those
        of the mode, such as "2d_row". Each rank is in one group of each name.

    Raises:
        ConfigError: The sizes do not fit each other.

    Examples:
        >>> parallel_groups(8, pipeline=2, tensor=2, mode="1d")["data"]
        [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    check_count(world_size=world_size, pipeline=pipeline, tensor=tensor, depth=depth)
    if mode not in _MESHES or (mode is None and tensor > 1):
        raise ConfigError(
            f"mode={mode!r} with tensor={tensor} is not a tensor-parallel mode: choose one of"
            f" {', '.join(repr(one) for one in _MESHES if one)}"
        )
    if world_size % (pipeline * tensor):
        raise ConfigError(
            f"pipeline={pipeline} times tensor={tensor} does not divide world_size={world_size}: choose sizes whose"
            " product does"
        )
    inner = _tensor_sizes(tensor, mode, depth)
    sizes = {"data": world_size // (pipeline * tensor), "pipeline": pipeline, **inner}
    along: dict[str, tuple[str, ...]] = {
        "global": tuple(sizes),
        "data": ("data",),
        "pipeline": ("pipeline",),
        "model": ("pipeline", *inner),
        "tensor": tuple(inner),
        **_GROUPS.get(mode, {}),
    }
    return {name: rank_groups(sizes, axes) for name, axes in along.items()}


def _tensor_sizes(tensor: int, mode: str | None, depth: int) -> dict[str, int]:
    axes = _MESHES[mode]
    if mode != "2.5d" and depth != 1:
        raise ConfigError(f"depth={depth} has no effect with mode={mode!r}: leave it out, or write mode='2.5d'")
    if len(axes) == 1:
        return {axes[0]: tensor}
    dims = 3 if mode == "3d" else 2
    side = round((tensor / depth) ** (1 / dims))
    sizes = {axis: depth if axis == "depth" else side for axis in axes}
    if math.prod(sizes.values()) != tensor:
        needed = {"2d": "a square, such as 4", "2.5d": "depth times a square, such as 8 with depth=2"}
        raise ConfigError(
            f"tensor={tensor} with mode={mode!r} and depth={depth} makes no mesh of equal sides: give"
            f" {needed.get(str(mode), 'a cube, such as 8')}"
        )
    return sizes
