"""Parameter updates that need statistics of full parameters, of which this rank may hold shards only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from booster.core.shard_aware import Shard, ShardBlock, Shards


@dataclass(slots=True, eq=False)
class ParamUpdate:
    """Update of one parameter that has a gradient.

    Attributes:
        parameter: Tensor of the param group, full or a shard.
        weights: The parameter itself, or an fp32 copy that is rounded into it after the step.
        gradient: Gradient, in the dtype of `weights`.
        state: Optimizer state of the parameter.
        group: Param group.
        shard: Shard that `parameter` holds, or None if it is full.
    """

    parameter: Tensor
    weights: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    shard: Shard | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        return tuple(self.parameter.shape) if self.shard is None else self.shard.global_shape

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    def blocks(self, tensor: Tensor) -> list[ShardBlock]:
        """Return the blocks of the full parameter that a tensor of the parameter's shape covers."""
        if self.shard is not None:
            return self.shard.blocks(tensor)
        return [ShardBlock(view=tensor, box=tuple((0, size) for size in tensor.shape), is_owned=True)]

    def sum_of_squares(self, tensor: Tensor) -> Tensor:
        """Return this rank's addend to the full parameter's sum of squares, a 0-dim tensor."""
        owned = [tensor] if self.shard is None else self.shard.owned(tensor)
        views = [view for view in owned if view.numel() > 0]
        if not views:
            return torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        return torch.stack(torch._foreach_norm(views)).square().sum()


@dataclass(frozen=True, slots=True, eq=False)
class UpdateBatch:
    """Updates of parameters that are computed together.

    All shards form one batch: one all-reduce per kind of sum serves any number of parameters. Intermediate tensors of a
    batch are as large as the gradients of this rank's shards. Full parameters need no communication, so each is a
    separate batch, and its intermediate tensors are freed before the next.

    Attributes:
        updates: Updates of the batch.
        shards: Shards over whose ranks sums are reduced, or None if all parameters are full.
    """

    updates: list[ParamUpdate]
    shards: Shards | None

    @classmethod
    def split(cls, steps: Iterable[ParamUpdate], shards: Shards | None) -> Iterator[UpdateBatch]:
        """Yield the batches of a step: one for all shards, and one for each full parameter.

        With `shards`, the first batch is yielded even if it is empty, as other ranks need its collectives.

        Args:
            steps: All updates of the step.
            shards: Shards of the optimizer, or None if it has none.
        """
        sharded: list[ParamUpdate] = []
        full: list[ParamUpdate] = []
        for step in steps:
            (full if step.shard is None else sharded).append(step)
        if shards is not None:
            yield cls(sharded, shards)
        for step in full:
            yield cls([step], None)

    @classmethod
    def join(cls, steps: Iterable[ParamUpdate], shards: Shards | None) -> Iterator[UpdateBatch]:
        """Yield the batches of a step, with all full parameters in one batch; see `split`."""
        batches = list(cls.split(steps, shards))
        yield from (batch for batch in batches if batch.shards is not None)
        full = [step for batch in batches if batch.shards is None for step in batch.updates]
        if full:
            yield cls(full, None)

    def reduced_sums(self, values: Sequence[Tensor], length_of: Callable[[tuple[int, ...]], int]) -> list[Tensor]:
        """Return, for every update, its vector summed over the shards of the full parameter.

        Args:
            values: This rank's addends, one vector for each of `updates`.
            length_of: Function that returns the length of the vector for a full parameter's shape.

        Collective over the ranks of `shards`, if there are any. One all-reduce.
        """
        if self.shards is None:
            return list(values)
        totals = self._all_reduce(self.shards, values, length_of)
        names = [step.shard.name for step in self.updates if step.shard is not None]
        return [totals[name].to(value) for name, value in zip(names, values, strict=True)]

    def reduced_sums_of_all(
        self, values: Sequence[Tensor], length_of: Callable[[tuple[int, ...]], int]
    ) -> list[Tensor]:
        """Return the sum of every parameter once, including parameters held by other ranks only; see `reduced_sums`."""
        return list(values) if self.shards is None else [*self._all_reduce(self.shards, values, length_of).values()]

    def _all_reduce(
        self, shards: Shards, values: Sequence[Tensor], length_of: Callable[[tuple[int, ...]], int]
    ) -> dict[str, Tensor]:
        by_name: dict[str, Tensor] = {}
        names = [step.shard.name for step in self.updates if step.shard is not None]
        for name, value in zip(names, values, strict=True):
            other = by_name.get(name)
            by_name[name] = value if other is None else other.to(value.device) + value
        return shards.sum_over_ranks(by_name, {name: length_of(shards.shapes[name]) for name in shards.names})
