"""Master weights that follow the model's weights."""

from __future__ import annotations

import torch

from booster.interface import Shard


@torch.no_grad()
def follow_weights(shard: Shard) -> None:
    """Copy changed model weights into their master shard.

    An element that still rounds to its weight keeps its full precision, so weights and masters can be loaded in any
    order.
    """
    weights = shard.model_param.detach().reshape(-1)[slice(*shard.span)]
    update_master(shard.parameter.detach(), weights)


@torch.no_grad()
def update_master(master: torch.Tensor, weights: torch.Tensor) -> None:
    """Overwrite each master element that does not round to its weight; both tensors have equal numbers of elements."""
    weights = weights.to(master.device)
    is_same = master.to(weights.dtype) == weights
    master.copy_(torch.where(is_same, master, weights.to(master.dtype)))
