"""Verify that layers read sharded weights only inside of modules that were verified with shards, by running them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from booster.core.layer_stacks import find_stacks
from booster.errors import ConfigError

from .equivalence_check import EquivalenceCheck, all_close, module_signature, record_calls, run, run_equivalence_check
from .plan import SHARDED_STYLES, TensorParallelPlan, generalize

# Note [Reads of sharded weights]
# A module that holds sharded linear layers is verified with shards. The layer around it may read their weights, too, as
# in `F.linear(x, self.mlp.up.weight)`, and would compute with a rank's shard. So a copy of the layer is run in which
# these modules return what they returned before, and again with other weights in them: what the layer then computes
# differently, it computes from weights that it reads itself. A layer that can't be run alone, or draws random numbers,
# is not verified.


def check_weight_reads(plan: TensorParallelPlan, model: nn.Module, verified: Collection[str]) -> None:
    """Verify that layers of stacks read sharded weights only inside of verified modules.

    Args:
        plan: The resolved plan.
        model: The user's model, possibly on the meta device. It is not changed.
        verified: Names of modules that compute the same with shards.

    Raises:
        ConfigError: A layer reads a sharded weight.
    """
    sharded = [entry.name for entry in plan.entries if entry.style in SHARDED_STYLES and not entry.is_parameter]
    known: set[tuple[object, ...]] = set()
    layers = (layer for stack in plan.stacks or find_stacks(model) for layer in stack)
    for name in (layer for layer in layers if layer not in verified):
        layer, prefix = model.get_submodule(name), f"{name}."
        owners = [one.removeprefix(prefix) for one in verified if one.startswith(prefix)]
        names = [one.removeprefix(prefix) for one in sharded if one.startswith(prefix)]
        names = [one for one in names if any(one.startswith(f"{owner}.") for owner in owners)]
        kind = module_signature(layer, (*owners, *names))
        if not names or kind in known:
            continue
        known.add(kind)
        read = _find_read(layer, owners, names)
        if read is not None:
            module = f"{prefix}{read.rpartition('.')[0]}"
            raise ConfigError(
                f"the layer {name!r} reads the parameter '{prefix}{read}' itself, outside of the module that holds"
                f" {module!r}, and tensor parallelism shards it, so that each rank would compute with its own part:"
                f" call the module, give the other computation a parameter of its own, or give a plan= without"
                f" {generalize(module)!r} and the layers that share its features"
            )


def _find_read(layer: nn.Module, owners: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the name of a parameter of the modules `names` that the layer reads outside of `owners`, or None."""
    check = run_equivalence_check(layer)
    if isinstance(check, str):
        return None
    checks = [one for one in (check, check.training) if one is not None]
    return next(filter(None, (_find_read_in(one, owners, names) for one in checks)), None)


def _find_read_in(check: EquivalenceCheck, owners: Sequence[str], names: Sequence[str]) -> str | None:
    _, calls = record_calls(copy.deepcopy(check.module), owners, check.inputs, check.arguments)
    module = copy.deepcopy(check.module)
    called = [owner for owner in owners if owner in calls]  # torch's own layers may run without a call of a module

    def output() -> list[torch.Tensor] | None:
        for owner in called:
            module.get_submodule(owner).forward = _replay(returned for _, returned in calls[owner])
        try:
            return run(module, check.inputs, check.arguments)
        except Exception:  # a user's forward may raise anything
            return None

    parameters = {
        f"{name}.{leaf}": parameter
        for name in names
        if any(name.startswith(f"{owner}.") for owner in called)
        for leaf, parameter in module.get_submodule(name).named_parameters(recurse=False)
        if parameter.is_floating_point()
    }
    expected = output()
    if expected is None or not all_close(expected, check.output):
        return None
    for name, parameter in parameters.items():
        parameter.data.add_(1.0)
        changed = output()
        if changed is None or not all_close(changed, expected):
            return name
    return None


def _replay(outputs: Iterator[Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: next(outputs)
