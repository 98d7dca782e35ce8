"""Brings a model and an optimizer's existing states to one device, and all replicas to the same weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import broadcast, require_same_on_all_ranks
from booster.errors import ConfigError
from booster.lazy_init import materialize

__all__ = ["make_replicas_equal", "move_to_device"]


def move_to_device(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
    """Moves parameters and buffers, and the states of an optimizer that has made steps already; lazy ones are filled.

    Raises:
        ConfigError: The model has parameters on the meta device, which have no values to move.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values: build the model on a real device, or call"
                " model.to_empty(device=...) and initialise it before boost()"
            )
    materialize(model, device)
    model.to(device)
    if optimizer is not None and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # puts every state where its parameter lies now


def make_replicas_equal(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Gives every rank of the group the weights and buffers of its first rank.

    Collective.

    Raises:
        DesyncError: The ranks' models differ in names, shapes, dtypes or in what needs a gradient.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    facts = [f"{name}: {tuple(t.shape)} {t.dtype} requires_grad={t.requires_grad}" for name, t in tensors]
    require_same_on_all_ranks("the model's parameters and buffers", facts, group)
    broadcast([tensor for _, tensor in tensors], group)
