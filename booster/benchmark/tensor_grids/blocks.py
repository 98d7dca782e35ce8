"""Block layouts of tensors on a mesh: pure functions of sizes and slices, no communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from booster.errors import ConfigError

__all__ = ["BlockLayout", "check_divisible"]


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
        raise ConfigError(
            f"{what} is {size}, which is not divisible by {num_shards} ranks: use"
            f" {' or '.join(map(str, _nearest_divisible(size, num_shards)))}"
        )


def _nearest_divisible(size: int, num_shards: int) -> Sequence[int]:
    below = size // num_shards * num_shards
    return [below, below + num_shards] if below else [num_shards]
