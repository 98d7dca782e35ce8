"""Checkpoint view of an optimizer over chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from booster.interface import TensorSpec
from booster.plugins.sharding.states import ShardedOptimizerState

if TYPE_CHECKING:
    from booster.plugins.gemini.optimizer import GeminiOptimizer

__all__ = ["GeminiOptimizerState"]


class GeminiOptimizerState(ShardedOptimizerState):
    """Checkpoint view of an optimizer whose states may be offloaded to disk, where they are read and filled.

    Args:
        optimizer: The optimizer to read and fill.
    """

    optimizer: GeminiOptimizer

    def _new_state_tensor(self, parameter: nn.Parameter, key: str, spec: TensorSpec) -> torch.Tensor:
        own = self._own_spec(parameter, key, spec)
        if not own.shape or own.shape != tuple(parameter.shape):
            return super()._new_state_tensor(parameter, key, spec)
        is_converted = own.dtype.is_floating_point and parameter.is_floating_point()  # as in memory
        dtype = parameter.dtype if is_converted else own.dtype
        if self._allocator is not None:
            allocated = super()._new_state_tensor(parameter, key, spec)
            if self._allocator.may_fail_locally:  # the allocator uses a separate disk
                return allocated
            dtype = allocated.dtype
        state = self.optimizer.new_state(parameter, key, dtype)
        return super()._new_state_tensor(parameter, key, spec) if state is None else state
