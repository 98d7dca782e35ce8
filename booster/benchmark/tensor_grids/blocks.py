"""Which block of a matrix the rank at a place of a grid holds: sizes and slices alone, without communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from booster.errors import ConfigError

__all__ = ["Layout", "require_divisible"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is cut over a grid, one entry a dimension: the axes that divide it, the outermost first.

    Ranks that differ along other axes only hold the same block.

    Attributes:
        axes: Of every dimension.
    """

    axes: tuple[tuple[str, ...], ...]

    def block(
        self, tensor: torch.Tensor, sizes: Mapping[str, int], places: Mapping[str, int], what: str = "a tensor"
    ) -> torch.Tensor:
        """Returns a copy of the block of a whole tensor that the rank at these places holds.

        Args:
            tensor: The whole one, with as many dimensions as the layout has.
            sizes: Ranks along each axis.
            places: Where the rank is along each axis.
            what: How an error calls the tensor.

        Raises:
            ConfigError: A dimension that the axes don't divide.
        """
        if tensor.dim() != len(self.axes):
            raise AssertionError(f"{what} of {tensor.dim()} dimensions has no layout of {len(self.axes)}")
        for dim, axes in enumerate(self.axes):
            num_parts = math.prod(sizes[axis] for axis in axes)
            require_divisible(f"dimension {dim} of {what}", tensor.shape[dim], num_parts)
            place = 0
            for axis in axes:
                place = place * sizes[axis] + places[axis]
            length = tensor.shape[dim] // num_parts
            tensor = tensor.narrow(dim, place * length, length)
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def require_divisible(what: str, size: int, num_parts: int) -> None:
    """Checks that a size can be cut into equal parts.

    Raises:
        ConfigError: It can't; the message has the next sizes that can.
    """
    if size % num_parts or not size:
        raise ConfigError(
            f"{what} is {size}, which {num_parts} ranks can't divide into equal blocks: take"
            f" {' or '.join(map(str, _divisible_near(size, num_parts)))}"
        )


def _divisible_near(size: int, num_parts: int) -> Sequence[int]:
    below = size // num_parts * num_parts
    return [below, below + num_parts] if below else [num_parts]
