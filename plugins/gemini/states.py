"""What a checkpoint reads and fills of an optimizer over chunks."""

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
    """The view of an optimizer of which some states are on a disk: they are read and filled there.

    Args:
        optimizer: The optimizer to read and fill.
    """

    optimizer: GeminiOptimizer

    def _new_state_tensor(self, parameter: nn.Parameter, key: str, spec: TensorSpec) -> torch.Tensor:
        tensor = super()._new_state_tensor(parameter, key, spec)
        if tensor.shape != parameter.shape or tensor.dim() == 0:
            return tensor
        room = self.optimizer.new_state(parameter, key, tensor.dtype)
        return tensor if room is None else room
