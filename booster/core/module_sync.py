"""Moving a model and its optimizer states to a device, and synchronizing replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import broadcast, raise_on_all_ranks
from booster.errors import ConfigError
from booster.lazy_init import materialize


def move_to_device(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
    """Move parameters, buffers and existing optimizer states to a device; lazy parameters are materialized.

    Collective: a rank without memory for it would leave the others waiting for its weights.

    Raises:
        ConfigError: The model has parameters on the meta device, without values; on all ranks if on any.
    """
    error: Exception | None = None
    try:
        check_materialized(model)
        materialize(model, device)
        if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
            model.to(device)
        if optimizer is not None and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # moves every state to its parameter's device
    except Exception as raised:  # raised again on all ranks
        error = raised
    raise_on_all_ranks(error)


def check_materialized(model: nn.Module) -> None:
    """Raise `ConfigError` if a parameter is on the meta device and was not made in a `LazyInitContext`."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values: build the model on a real device, or call"
                " model.to_empty(device=...) and initialise it before boost()"
            )


def sync_module_states(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast weights and buffers from the group's first rank.

    Collective: the ranks' models have the same names, shapes and dtypes.
    """
    broadcast([*model.parameters(), *model.buffers()], group)
