"""Shard a model's parameters and their optimizer state in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import ShardSpec, set_shard_spec, shard_spec_of
from booster.plugins.sharding.deferred_init import Materializer
from booster.pytree import copy_with_tensors

from .placeholders import drop_tensors, replace_by_meta


@torch.no_grad()
def shard_parameters(
    model: nn.Module,
    optimizer: Optimizer | None,
    shard_specs: Mapping[str, ShardSpec],
    materializer: Materializer,
    *,
    absent_ids: Collection[int] = (),
) -> dict[str, nn.Parameter]:
    """Materialize every parameter and keep this rank's shard of it.

    Lazy and meta parameters are materialized module by module, so that the unsharded parameters of at most one module
    are in memory at a time.

    Args:
        model: The user's model.
        optimizer: The user's optimizer, whose existing states are sharded as well.
        shard_specs: This rank's shard spec of every parameter by name, tied ones once.
        materializer: Materializer of the model.
        absent_ids: The `id`s of modules that other stages hold; their tensors are removed.

    Returns:
        The model's parameters by name, tied ones once. Those of absent modules only are on the meta device, and are
        removed from the optimizer's param groups.

    Collective: yes.
    """
    materializer.sync_initialized()
    if optimizer is not None and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # moves every state to its parameter's device
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {
        names[id(parameter)]
        for module in model.modules()
        if id(module) not in absent_ids
        for parameter in module.parameters(recurse=False)
    }
    before = dict(model.named_parameters())
    after: dict[str, nn.Parameter] = {}
    placeholders: dict[int, nn.Parameter] = {}
    dropped: list[nn.Parameter] = []  # keeps the objects alive, so that their ids stay unique
    for module in model.modules():
        own = [names[id(one)] for one in module.parameters(recurse=False)]
        materializer.fill([module])
        found = dict(zip(own, module.parameters(recurse=False), strict=True))
        for name, parameter in found.items():
            names[id(parameter)] = name
            if name in held and name not in after:
                shard_parameter(parameter, shard_specs[name], optimizer)
                after[name] = parameter
        if id(module) in absent_ids:
            replace_by_meta(module, placeholders)
            for name, parameter in found.items():
                if name not in held:
                    after.setdefault(name, placeholders[id(parameter)])
                    parameter.data, parameter.grad = parameter.data.new_empty(0), None  # other references may remain
                    dropped.append(parameter)
    # Only after all modules: materializing an ancestor may initialize all of its descendants.
    for module in model.modules():
        if id(module) in absent_ids:
            drop_tensors(module)
    after = {name: after[name] for name in before}
    if optimizer is not None:
        _repoint_optimizer(optimizer, before, after, held)
    return after


@torch.no_grad()
def shard_parameter(parameter: nn.Parameter, shard_spec: ShardSpec, optimizer: Optimizer | None = None) -> None:
    """Keep the shard of a parameter that its spec describes, in place, and of its optimizer state."""
    if not shard_spec.is_unsharded:
        parameter.data = shard_spec.shard(parameter.data)
        parameter.grad = None
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            state[key] = copy_with_tensors(lambda tensor: _shard_state(tensor, shard_spec), value)
    set_shard_spec(parameter, shard_spec)


def _shard_state(tensor: torch.Tensor, shard_spec: ShardSpec) -> torch.Tensor:
    return shard_spec.shard(tensor) if tensor.shape == shard_spec.logical_shape else tensor.detach().clone()


def _repoint_optimizer(
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
    assert all(shard_spec_of(after[name]).local_shape == tuple(after[name].shape) for name in held)
