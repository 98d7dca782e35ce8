"""Shard a model's parameters and their optimizer state in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import ParameterLayout, layout_of, set_layout
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stand_ins import show_stand_ins, take_tensors
from booster.plugins.sharding.deep_copies import copy_with_tensors
from booster.plugins.sharding.materializing import Materializer

__all__ = ["cut_model", "cut_parameter"]


@torch.no_grad()
def cut_model(
    model: nn.Module,
    optimizer: Optimizer | None,
    layouts: Mapping[str, ParameterLayout],
    materializer: Materializer,
    *,
    absent: Collection[int] = (),
) -> dict[str, nn.Parameter]:
    """Materialize every parameter and keep this rank's shard of it.

    Lazy and meta parameters are materialized module by module, so that the unsharded parameters of at most one module
    are in memory at a time.

    Args:
        model: The user's model.
        optimizer: The user's optimizer, whose existing states are sharded as well.
        layouts: This rank's shard spec of every parameter by name, tied ones once.
        materializer: Materializer of the model.
        absent: The `id`s of modules that other stages hold; their tensors are removed.

    Returns:
        The model's parameters by name, tied ones once. Those of absent modules only are on the meta device, and are
        removed from the optimizer's param groups.

    Collective: yes.
    """
    materializer.place_real()
    if optimizer is not None and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # moves every state to its parameter's device
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {id(one) for module in model.modules() if id(module) not in absent for one in _own(module)}
    held = {names[key] for key in kept}
    before = dict(model.named_parameters())
    after: dict[str, nn.Parameter] = {}
    taken: dict[int, nn.Parameter] = {}
    gone: list[nn.Parameter] = []  # keeps the objects alive, so that their ids stay unique
    for module in model.modules():
        own = [names[id(one)] for one in _own(module)]
        materializer.fill([module])
        found = dict(zip(own, _own(module), strict=True))
        for name, parameter in found.items():
            names[id(parameter)] = name
            if name in held and name not in after:
                cut_parameter(parameter, layouts[name], optimizer)
                after[name] = parameter
        if id(module) in absent:
            show_stand_ins(module, taken)
            for name, parameter in found.items():
                if name not in held:
                    after.setdefault(name, taken[id(parameter)])
                    parameter.data, parameter.grad = parameter.data.new_empty(0), None  # other references may remain
                    gone.append(parameter)
    # Only after all modules: materializing an ancestor may initialize all of its descendants.
    for module in model.modules():
        if id(module) in absent:
            take_tensors(module)
    after = {name: after[name] for name in before}
    if optimizer is not None:
        _follow(optimizer, before, after, held)
    return after


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


@torch.no_grad()
def cut_parameter(parameter: nn.Parameter, layout: ParameterLayout, optimizer: Optimizer | None = None) -> None:
    """Keep the shard of a parameter that its spec describes, in place, and of its optimizer state."""
    if not layout.is_whole:
        parameter.data = layout.cut(parameter.data)
        parameter.grad = None
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            state[key] = copy_with_tensors(lambda tensor: _cut_state(tensor, layout), value)
    set_layout(parameter, layout)


def _cut_state(tensor: torch.Tensor, layout: ParameterLayout) -> torch.Tensor:
    return layout.cut(tensor) if tensor.shape == layout.logical_shape else tensor.detach().clone()


def _follow(
    optimizer: Optimizer,
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
    held: Collection[str],
) -> None:
    """Point an optimizer at the replaced parameters, and drop those that this rank does not hold."""
    names = {id(parameter): name for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"][:] = [after[names[id(one)]] for one in group["params"] if names[id(one)] in held]
    for old in [one for one in optimizer.state if id(one) in names]:
        name = names[id(old)]
        if name not in held:
            del optimizer.state[old]
        elif after[name] is not old:
            optimizer.state[after[name]] = optimizer.state.pop(old)
    assert all(layout_of(after[name]).local_shape == tuple(after[name].shape) for name in held)
