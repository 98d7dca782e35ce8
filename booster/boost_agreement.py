"""What all ranks give to boost() must be alike: it is compared before anything is changed."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.boost_checks import check_can_boost
from booster.comm import agree, are_others_imagined, group_size
from booster.data import check_can_shard
from booster.interface import MixedPrecision, Plugin

__all__ = ["agree_on_boost", "boost_facts", "installed_versions"]

# Note [What ranks may differ in]
# Ranks do their parts of one computation, so all that decides which collectives they call, and on what, is compared:
# versions, strategy, formats, parameters and the optimizer over them. Left out is what may well be another one on each
# rank: the device, the values (the plugin gives all ranks the first rank's), which ranks have values at all and which
# have parameters on the meta device, groups of ranks as objects, and what batches the loader will give. That a package
# is imported on one rank alone, as for its logs, is no difference either: versions are those that are installed.


def agree_on_boost(
    plugin: Plugin,
    mixed_precision: MixedPrecision | None,
    model: Any,
    optimizer: Any | None,
    criterion: Any | None,
    dataloader: Any | None,
    lr_scheduler: Any | None,
) -> None:
    """Returns if these can be boosted together on every rank, and all ranks were given the same; else raises on all.

    Collective: the first that ranks do in boost(). Nothing is changed.

    Raises:
        ConfigError: They can't be boosted together; on all ranks if on any.
        DesyncError: The ranks were given different things; the message names the ranks, and the first difference.
    """
    error: Exception | None = None
    facts: list[str] = []
    try:
        check_can_boost(model, optimizer, criterion, dataloader, lr_scheduler)
        plugin.check(model, optimizer)
        if dataloader is not None:
            check_can_shard(dataloader, plugin.dp_rank, plugin.dp_size)
        if group_size() > 1 and not are_others_imagined():
            facts = boost_facts(plugin, mixed_precision, model, optimizer)
            facts += _given(criterion=criterion, dataloader=dataloader, lr_scheduler=lr_scheduler)
    except Exception as raised:  # it is raised again, here and on all other ranks
        error = raised
    agree("boost()", facts, error=error)


def boost_facts(
    plugin: Plugin, mixed_precision: MixedPrecision | None, model: nn.Module, optimizer: Optimizer | None
) -> list[str]:
    """Returns what must be the same on all ranks; see Note [What ranks may differ in].

    What explains the most comes first, as ranks are told the first difference: with another model the optimizer
    differs too.
    """
    model_facts, names = _model_facts(model)
    precision = ["no mixed precision"] if mixed_precision is None else mixed_precision.agreement_facts()
    return [
        *(f"{name} {number}" for name, number in installed_versions(_is_of_transformers(model)).items()),
        f"the plugin {type(plugin).__qualname__}",
        *(f"{type(plugin).__qualname__} with {fact}" for fact in plugin.agreement_facts()),
        *precision,
        *model_facts,
        *(["no optimizer"] if optimizer is None else _optimizer_facts(names, optimizer)),
    ]


@functools.cache
def installed_versions(with_transformers: bool = False) -> dict[str, str]:
    """Returns the versions of what decides how ranks work together; of Python without the number of bug fixes."""
    import booster

    packages = ["numpy", "safetensors", *(["transformers"] if with_transformers else [])]
    own = {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    return own | {"torch-booster": booster.__version__} | {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _is_of_transformers(model: nn.Module) -> bool:
    if "transformers" not in sys.modules:
        return False
    return any(type(module).__module__.startswith("transformers.") for module in model.modules())


def _given(**objects: Any | None) -> list[str]:
    return [f"no {name}" if given is None else f"a {name}" for name, given in objects.items()]


# The model.


def _model_facts(model: nn.Module) -> tuple[list[str], dict[int, str]]:
    """Returns a line for every name of a parameter or buffer, in the model's order, and by `id` the first names."""
    # One walk over the modules, which costs more than all that is asked of the tensors.
    parameters: list[str] = []
    buffers: list[str] = []
    first_names: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for tensors, facts, describe in (
            (module._parameters, parameters, _describe_parameter),
            (module._buffers, buffers, _describe_buffer),
        ):
            for key, tensor in tensors.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    first = first_names.setdefault(id(tensor), name)
                    facts.append(describe(name, tensor) if first is name else f"{name}: tied to {first}")
    return parameters + buffers, first_names


def _describe_parameter(name: str, parameter: torch.Tensor) -> str:
    return f"{name}: {tuple(parameter.shape)} {parameter.dtype} requires_grad={parameter.requires_grad}"


def _describe_buffer(name: str, buffer: torch.Tensor) -> str:
    return f"{name}: {tuple(buffer.shape)} {buffer.dtype} (a buffer)"


# The optimizer.


def _optimizer_facts(names: Mapping[int, str], optimizer: Optimizer) -> list[str]:
    """Returns its class, and of each of the param groups which parameters it has and with which options."""
    facts = [f"the optimizer {type(optimizer).__qualname__}", f"{len(optimizer.param_groups)} param groups"]
    for index, group in enumerate(optimizer.param_groups):
        members = ", ".join(names[id(parameter)] for parameter in group["params"])
        facts.append(f"param groups with {members or 'nothing'} in group {index}")
        plain = {key: _plain(value) for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        facts += [f"param groups with {key}={value} in group {index}" for key, value in plain.items()]
    return facts


def _plain(value: Any) -> str:
    """Returns a text that is the same on all ranks for options that are the same; of other objects the class alone."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return repr(value.item())
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_plain(one) for one in value)})"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    return type(value).__qualname__
