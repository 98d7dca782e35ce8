"""Moves state that an optimizer has for a whole parameter to the shards of it that a rank updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import Shard

from .deferred_init import copy_with_tensors

# torch's own numbers per parameter. They are tensors without dimensions, as a scalar parameter's moments are.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
# Our own sums over rows and columns. They may have the shape of what a tensor-parallel rank has of a narrow matrix.
_OF_WHOLES = frozenset({"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"})


def shard_state(optimizer: Optimizer, parameter: nn.Parameter, shards: Sequence[Shard]) -> None:
    """Move the state of a whole parameter, from steps or a constructor before boost(), to this rank's shards of it.

    Tensors of the parameter's shape are cut; like in torch's `load_state_dict`, floating-point ones take the dtype of
    the shard (fp32 where it is a master). Everything else is copied for each shard. Nothing of the whole state is kept.

    Args:
        optimizer: The user's optimizer; its `state` is changed, its `param_groups` are not.
        parameter: The whole parameter, as it was in `param_groups`.
        shards: Shards that this rank updates; without any, the state is dropped.
    """
    whole = optimizer.state.pop(parameter, None)
    if whole is None or (isinstance(whole, Mapping) and not whole):
        return
    for shard in shards:
        optimizer.state[shard.parameter] = _part_of(whole, parameter, shard)


def _part_of(whole: Any, parameter: nn.Parameter, shard: Shard) -> Any:
    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != parameter.shape:
            return number(tensor)
        target = shard.parameter
        dtype = target.dtype if tensor.is_floating_point() else tensor.dtype
        part = tensor.detach().reshape(-1)[slice(*shard.span)].to(target.device, dtype, copy=True)
        return part.view(target.shape)

    def number(tensor: torch.Tensor) -> torch.Tensor:
        device = shard.parameter.device if tensor.device == parameter.device else tensor.device
        return tensor.detach().to(device, copy=True)

    if not isinstance(whole, Mapping):
        return copy_with_tensors(part, whole)
    return {
        key: copy_with_tensors(number if key in _NUMBERS | _OF_WHOLES else part, value) for key, value in whole.items()
    }
