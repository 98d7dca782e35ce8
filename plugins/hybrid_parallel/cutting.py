"""Takes a model's parameters down to this rank's parts, one after the other, with what an optimizer has of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import ParameterLayout, layout_of, set_layout
from booster.plugins.sharding.deep_copies import copy_with_tensors
from booster.plugins.sharding.materializing import Materializer

__all__ = ["cut_model"]


@torch.no_grad()
def cut_model(
    model: nn.Module,
    optimizer: Optimizer | None,
    layouts: Mapping[str, ParameterLayout],
    materializer: Materializer,
) -> None:
    """Gives every parameter its values where it has none, and keeps this rank's part of it.

    Parameters that have values are cut in place; what is lazy or on the meta device is filled module by module, so
    that no rank ever holds more whole than one module's own parameters. Collective.

    Args:
        model: The user's model.
        optimizer: The user's optimizer; states of steps that it has made are cut, too.
        layouts: What this rank holds of every parameter, by name, tied ones once.
        materializer: Of the model.
    """
    materializer.place_real()
    if optimizer is not None and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # puts every state where its parameter lies now
    pending = dict(layouts)
    before = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        materializer.fill([module])
        for own_name, parameter in module.named_parameters(recurse=False):
            layout = pending.pop(f"{prefix}.{own_name}" if prefix else own_name, None)
            if layout is not None:
                _cut(parameter, layout, optimizer)
    if optimizer is not None:
        _follow_replaced(optimizer, before, dict(model.named_parameters()))


def _cut(parameter: nn.Parameter, layout: ParameterLayout, optimizer: Optimizer | None) -> None:
    if not layout.is_whole:
        parameter.data = layout.cut(parameter.data)
        parameter.grad = None
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            state[key] = copy_with_tensors(lambda tensor: _cut_state(tensor, layout), value)
    set_layout(parameter, layout)


def _cut_state(tensor: torch.Tensor, layout: ParameterLayout) -> torch.Tensor:
    return layout.cut(tensor) if tensor.shape == layout.logical_shape else tensor.detach().clone()


def _follow_replaced(
    optimizer: Optimizer, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> None:
    """Points an optimizer at parameters that took the place of others, which were on the meta device."""
    new: dict[int, Any] = {id(before[name]): after[name] for name in before if before[name] is not after[name]}
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(one), one) for one in group["params"]]
    for old in [one for one in optimizer.state if id(one) in new]:
        optimizer.state[new[id(old)]] = optimizer.state.pop(old)
    assert all(layout_of(one).local_shape == tuple(one.shape) for one in after.values())
