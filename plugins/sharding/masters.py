"""Master weights that follow the model's weights."""

from __future__ import annotations

import torch

from booster.interface import Shard


@torch.no_grad()
def follow_weights(shard: Shard) -> None:
    """Take the model's weights over into a shard that is a copy of them.

    An element that still rounds to its weight keeps its extra digits, so the order of loading weights and masters does
    not matter.
    """
    weights = shard.model_param.detach().reshape(-1)[slice(*shard.span)]
    take_over(shard.parameter.detach(), weights)


@torch.no_grad()
def take_over(master: torch.Tensor, weights: torch.Tensor) -> None:
    """Set each element of a master that does not round to its weight to that weight; of as many elements."""
    weights = weights.to(master.device)
    is_same = master.to(weights.dtype) == weights
    master.copy_(torch.where(is_same, master, weights.to(master.dtype)))
