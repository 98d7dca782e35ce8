"""Sharding of forward arguments that have an entry per head: each rank's modules receive those of its own heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from booster.plugins.hybrid_parallel.plans.plan import ShardedArgument
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.splits import units_of_rank
from booster.plugins.sharding.compiling import not_compiled

__all__ = ["shard_argument"]


def shard_argument(modules: Mapping[str, nn.Module], split: ShardedArgument, tp_group: TensorParallelGroup) -> None:
    """Pass only this rank's heads of an argument to a module's forward, as for Bloom's position biases.

    Args:
        modules: The model's modules by name.
        split: The argument and its module.
        tp_group: The tensor-parallel group.

    Collective: no.
    """
    unit_range = units_of_rank(split.block, tp_group.size, tp_group.rank)
    entry = _LocalHeads(split.argument, split.dim, split.block.num_units, slice(unit_range.start, unit_range.stop))
    modules[split.module].register_forward_pre_hook(entry, with_kwargs=True)


class _LocalHeads:
    """Forward pre-hook that narrows a dimension in which units vary fastest, such as (batch * heads, ...)."""

    def __init__(self, argument: str, dim: int, num_units: int, own: slice) -> None:
        self._argument = argument
        self._dim = dim
        self._num_units = num_units
        self._own = own

    @not_compiled
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        value = kwargs.get(self._argument)
        if not isinstance(value, torch.Tensor):
            return args, kwargs
        # A 3-d argument has batch and heads in one dimension, a 4-d one has them separate.
        dim = 1 if self._dim == 0 and value.dim() == 4 else self._dim
        if value.shape[dim] % self._num_units:
            return args, kwargs  # a mask that is the same for all heads
        units = value.unflatten(dim, (-1, self._num_units))
        own = units.narrow(dim + 1, self._own.start, self._own.stop - self._own.start).flatten(dim, dim + 1)
        return args, {**kwargs, self._argument: own}
