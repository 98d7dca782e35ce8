"""Brings a model and an optimizer's existing states to one device, and all replicas to the same weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import broadcast, raise_on_all_ranks
from booster.errors import ConfigError
from booster.lazy_init import materialize

__all__ = ["make_replicas_equal", "move_to_device", "require_values"]


def move_to_device(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
    """Moves parameters and buffers, and the states of an optimizer that has made steps already; lazy ones are filled.

    Collective: a rank that has no memory for it would leave the others waiting for its weights.

    Raises:
        ConfigError: The model has parameters on the meta device, which have no values to move; on all ranks if on any.
    """
    error: Exception | None = None
    try:
        _move(model, optimizer, device)
    except Exception as raised:  # it is raised again, here and on all other ranks
        error = raised
    raise_on_all_ranks(error)


def require_values(model: nn.Module) -> None:
    """Returns if all parameters have values, or were made in a `LazyInitContext`, which knows how to make them.

    Raises:
        ConfigError: The model has parameters on the meta device.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values: build the model on a real device, or call"
                " model.to_empty(device=...) and initialise it before boost()"
            )


def _move(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
    require_values(model)
    materialize(model, device)
    model.to(device)
    if optimizer is not None and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # puts every state where its parameter lies now


def make_replicas_equal(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Gives every rank of the group the weights and buffers of its first rank.

    Collective: the ranks' models have the same names, shapes and dtypes.
    """
    broadcast([*model.parameters(), *model.buffers()], group)
