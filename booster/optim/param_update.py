"""Steps of optimizers that look at whole parameters, of which this rank may have parts only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from booster.core.shard_aware import Shard, ShardBlock, Shards

# Note [Batches of a step]
# Sums over a whole parameter cost one message, whatever number of parameters it is about. So all shards are updated
# together, each kind of sum by one all-reduce, and what is computed in between is kept for all of them: as much as the
# gradients of this rank's shards. Parameters that this rank has whole need no message, and are updated one by one, so
# that nothing is kept of one when the next one comes.


@dataclass(slots=True, eq=False)
class ParameterStep:
    """One of `param_groups`' parameters, with a gradient, and what its update needs.

    Attributes:
        parameter: As it is in the group: whole, or a shard.
        weights: Itself, or an fp32 copy of it that is rounded into it after the step.
        gradient: In the format of `weights`.
        state: The optimizer's.
        group: The param group.
        shard: What `parameter` is a part of; None: it is whole.
    """

    parameter: Tensor
    weights: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    shard: Shard | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.parameter.shape) if self.shard is None else self.shard.global_shape

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def counted(self, tensor: Tensor) -> list[Tensor]:
        """Return the elements of a tensor of the parameter's shape that this rank counts in a sum over the whole."""
        return [tensor] if self.shard is None else self.shard.owned(tensor)

    def blocks(self, tensor: Tensor) -> list[ShardBlock]:
        """Return where the elements of a tensor of the parameter's shape lie in the whole one."""
        return [whole_block(tensor)] if self.shard is None else self.shard.blocks(tensor)

    def sum_of_squares(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the sum over the whole parameter, without dimensions."""
        views = [view for view in self.counted(tensor) if view.numel() > 0]
        if not views:
            return torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        return torch.stack(torch._foreach_norm(views)).square().sum()

    def write_back(self) -> None:
        """Round a copy of the weights into the parameter."""
        if self.weights is not self.parameter:
            self.parameter.copy_(self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Parameters that are updated together; see Note [Batches of a step].

    Attributes:
        steps: Of each of them.
        shards: Over whose ranks to sum; None: all of the parameters are whole.
    """

    steps: list[ParameterStep]
    shards: Shards | None

    @classmethod
    def divide(cls, steps: Iterable[ParameterStep], shards: Shards | None) -> Iterator[StepBatch]:
        """Yield the batches of a step: the shards', also if there are none of them, and one for each whole parameter.

        Args:
            steps: All of the step.
            shards: Of the optimizer; None: it has none.
        """
        cut: list[ParameterStep] = []
        whole: list[ParameterStep] = []
        for step in steps:
            (whole if step.shard is None else cut).append(step)
        if shards is not None:
            yield cls(cut, shards)
        for step in whole:
            yield cls([step], None)

    @classmethod
    def join(cls, steps: Iterable[ParameterStep], shards: Shards | None) -> Iterator[StepBatch]:
        """Yield the batches of a step, with all whole parameters in one; see `divide`."""
        batches = list(cls.divide(steps, shards))
        yield from (batch for batch in batches if batch.shards is not None)
        whole = [step for batch in batches if batch.shards is None for step in batch.steps]
        if whole:
            yield cls(whole, None)

    def sums(self, values: Sequence[Tensor], length_of: Callable[[tuple[int, ...]], int]) -> list[Tensor]:
        """Return for every step the sum over its whole parameter, where `values` are this rank's parts of it.

        Args:
            values: A vector for each of `steps`.
            length_of: How many numbers there are for a parameter of a shape.

        Collective over the ranks of `shards`, if there are any. One all-reduce.
        """
        if self.shards is None:
            return list(values)
        totals = self._totals(self.shards, values, length_of)
        names = [step.shard.name for step in self.steps if step.shard is not None]
        return [totals[name].to(value) for name, value in zip(names, values, strict=True)]

    def all_sums(self, values: Sequence[Tensor], length_of: Callable[[tuple[int, ...]], int]) -> list[Tensor]:
        """Return each parameter's sum once, those of parameters that other ranks alone hold as well; see `sums`."""
        return list(values) if self.shards is None else [*self._totals(self.shards, values, length_of).values()]

    def _totals(
        self, shards: Shards, values: Sequence[Tensor], length_of: Callable[[tuple[int, ...]], int]
    ) -> dict[str, Tensor]:
        by_name: dict[str, Tensor] = {}
        names = [step.shard.name for step in self.steps if step.shard is not None]
        for name, value in zip(names, values, strict=True):
            other = by_name.get(name)
            by_name[name] = value if other is None else other.to(value.device) + value
        return shards.sum_over_ranks(by_name, {name: length_of(shards.shapes[name]) for name in shards.names})


def whole_block(tensor: Tensor) -> ShardBlock:
    """Return the block that a parameter is which this rank has whole."""
    return ShardBlock(view=tensor, box=tuple((0, size) for size in tensor.shape), is_owned=True)
