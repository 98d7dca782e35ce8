"""Optimizer states and masters of shards: sharding of existing states, masters that follow the model's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import Shard

from .deferred_init import copy_with_tensors

# 0-dim state tensors of torch's optimizers that are not per element, even for a scalar parameter.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
# Factored second moments of our optimizers. They may have the shape of a tensor-parallel shard of a narrow matrix.
_FACTORED = frozenset({"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"})


def shard_state(optimizer: Optimizer, parameter: nn.Parameter, shards: Sequence[Shard]) -> None:
    """Move a parameter's optimizer state from before boost() to this rank's shards of the parameter.

    Tensors of the parameter's shape are sharded. As in torch's `load_state_dict`, floating-point tensors take the dtype
    of the shard (fp32 if it is a master). Other state is copied for each shard. The unsharded state is dropped.

    Args:
        optimizer: The user's optimizer; only its `state` is modified.
        parameter: The unsharded parameter of `param_groups`.
        shards: Shards that this rank updates; if empty, the state is dropped.
    """
    full = optimizer.state.pop(parameter, None)
    if full is None or (isinstance(full, Mapping) and not full):
        return
    for shard in shards:
        optimizer.state[shard.parameter] = _shard_of(full, parameter, shard)


def _shard_of(full: Any, parameter: nn.Parameter, shard: Shard) -> Any:
    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != parameter.shape:
            return number(tensor)
        target = shard.parameter
        dtype = target.dtype if tensor.is_floating_point() else tensor.dtype
        part = tensor.detach().reshape(-1)[slice(*shard.span)].to(target.device, dtype, copy=True)
        return part.view(target.shape)

    def number(tensor: torch.Tensor) -> torch.Tensor:
        # Factors of a matrix are where it is; a number, such as that of steps, may stay in host memory.
        follows = tensor.dim() > 0 or tensor.device == parameter.device
        device = shard.parameter.device if follows else tensor.device
        return tensor.detach().to(device, copy=True)

    if not isinstance(full, Mapping):
        return copy_with_tensors(part, full)
    return {
        key: copy_with_tensors(number if key in _SCALARS | _FACTORED else part, value) for key, value in full.items()
    }


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
