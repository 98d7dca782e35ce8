"""Mesh of ranks with named axes, and its process groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.comm import group_rank, group_size, is_initialized, new_group_of_rows
from booster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sharding of a tensor over a mesh. Blocks are replicated along all other axes.

    Attributes:
        axes: Mesh axes that shard each dimension, the outermost first.
    """

    axes: tuple[tuple[str, ...], ...]

    def block(
        self, tensor: torch.Tensor, sizes: Mapping[str, int], coordinates: Mapping[str, int], what: str = "a tensor"
    ) -> torch.Tensor:
        """Return a copy of the block of a tensor at these mesh coordinates.

        Args:
            tensor: Unsharded tensor, with as many dimensions as the layout.
            sizes: Number of ranks along each axis.
            coordinates: Coordinate of the rank along each axis.
            what: Name of the tensor in errors.

        Raises:
            ConfigError: A dimension is not divisible by the sizes of its axes.
        """
        if tensor.dim() != len(self.axes):
            raise AssertionError(f"{what} has {tensor.dim()} dimensions, but its layout has {len(self.axes)}")
        for dim, axes in enumerate(self.axes):
            num_shards = math.prod(sizes[axis] for axis in axes)
            check_divisible(f"dimension {dim} of {what}", tensor.shape[dim], num_shards)
            shard_index = 0
            for axis in axes:
                shard_index = shard_index * sizes[axis] + coordinates[axis]
            length = tensor.shape[dim] // num_shards
            tensor = tensor.narrow(dim, shard_index * length, length)
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def check_divisible(what: str, size: int, num_shards: int) -> None:
    """Check that a size is divisible into equal shards.

    Raises:
        ConfigError: It is not; the message suggests the nearest valid sizes.
    """
    if size % num_shards or not size:
        below = size // num_shards * num_shards
        nearest = f"{below} or {below + num_shards}" if below else f"{num_shards}"
        raise ConfigError(f"{what} is {size}, which is not divisible by {num_shards} ranks: use {nearest}")


class RankMesh:
    """Mesh of all ranks of the world; consecutive ranks differ along the last axis.

    Collective: every rank of the world creates it with the same sizes and closes it.

    Args:
        sizes: Number of ranks along each axis, the outermost first.

    Raises:
        ConfigError: The product of the sizes is not the world size.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        num_ranks = math.prod(sizes.values())
        if num_ranks != group_size() or min(sizes.values()) < 1:
            raise ConfigError(
                f"a mesh of {' x '.join(f'{axis} {size}' for axis, size in sizes.items())} needs {num_ranks} ranks,"
                f" but there are {group_size()}: start {max(num_ranks, 1)} ranks, or give sizes whose product is"
                f" {group_size()}"
            )
        self.sizes: Mapping[str, int] = dict(sizes)
        self._coordinates_by_rank = list(itertools.product(*(range(size) for size in sizes.values())))
        self.coordinates: Mapping[str, int] = dict(zip(sizes, self._coordinates_by_rank[group_rank()], strict=True))
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one along these axes only, in mesh order; None is the world.

        Collective over the world at the first call for these axes.
        """
        key = tuple(axis for axis in self.sizes if axis in axes)
        if key not in self._groups:
            self._groups[key] = self._new_group(key)
        return self._groups[key]

    def block(self, tensor: torch.Tensor, layout: BlockLayout, what: str = "a tensor") -> torch.Tensor:
        """Return a copy of this rank's block of an unsharded tensor.

        Raises:
            ConfigError: A dimension is not divisible by the mesh sizes.
        """
        return layout.block(tensor, self.sizes, self.coordinates, what)

    def close(self) -> None:
        """Destroy the groups. Collective over the world, after the last use of the mesh."""
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _new_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        if not is_initialized() or math.prod(self.sizes[axis] for axis in axes) == group_size():
            return None
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in enumerate(self._coordinates_by_rank):
            other_coordinates = tuple(
                coordinate for axis, coordinate in zip(self.sizes, coordinates, strict=True) if axis not in axes
            )
            lines.setdefault(other_coordinates, []).append(rank)
        return new_group_of_rows(list(lines.values()))


def summa_mesh(side: int, depth: int = 1) -> RankMesh:
    """Return the mesh of 2D (depth 1) and 2.5D tensor parallelism: `depth` * `side` * `side` ranks.

    Collective over the world.

    Raises:
        ConfigError: The world has another size.
    """
    return RankMesh({"depth": depth, "row": side, "column": side})


def linear_3d_mesh(side: int) -> RankMesh:
    """Return the mesh of 3D tensor parallelism: `side` * `side` * `side` ranks; see Note [3D].

    Collective over the world.

    Raises:
        ConfigError: The world has another size.
    """
    return RankMesh({"output": side, "input": side, "weight": side})
