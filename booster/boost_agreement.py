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
from torch.optim.lr_scheduler import LRScheduler

from booster.boost_checks import check_can_boost
from booster.comm import agree, are_others_imagined, group_size
from booster.data import check_can_shard
from booster.data.prepare import loader_facts
from booster.interface import MixedPrecision, Plugin

__all__ = ["agree_on_boost", "boost_facts", "installed_versions"]

# Note [What ranks may differ in]
# Ranks do their parts of one computation, so all that decides which collectives they call, and on what, is compared:
# versions, strategy, formats, parameters, the optimizer over them, the state of its scheduler, and of a loader by what
# rule its samples are split over the ranks. Left out is what may well be another one on each rank: the device, the
# values (the plugin gives all ranks the first rank's), which ranks have values at all and which have parameters on the
# meta device, groups of ranks as objects, functions, and what samples a loader reads whose sampler is the user's own:
# for those there is join_uneven(). That a package is imported on one rank alone, as for its logs, is no difference
# either: versions are those that are installed.


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
            facts += ["no lr_scheduler"] if lr_scheduler is None else _scheduler_facts(lr_scheduler)
            facts += ["no criterion" if criterion is None else "a criterion"]
            facts += ["no dataloader"] if dataloader is None else loader_facts(dataloader)
    except Exception as raised:  # it is raised again, here and on all other ranks
        error = raised
    agree("boost()", facts, error=error)


def boost_facts(
    plugin: Plugin, mixed_precision: MixedPrecision | None, model: nn.Module, optimizer: Optimizer | None
) -> list[str]:
    """Returns what of plugin, model and optimizer must be the same on all ranks; see Note [What ranks may differ in].

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


# The scheduler.


def _scheduler_facts(scheduler: Any) -> list[str]:
    """Returns its class, and the plain values of its state if it is one of torch's; the same text in every process."""
    try:
        return _walk_scheduler("the lr_scheduler", scheduler)
    except Exception:  # its state_dict() or a value there is the user's own code, and boost() can do without
        return [f"the lr_scheduler {type(scheduler).__qualname__}"]


def _walk_scheduler(name: str, scheduler: Any) -> list[str]:
    title = f"{name} {type(scheduler).__qualname__}"
    facts = [title]
    for key, value in _scheduler_state(scheduler):
        parts = {f"{key}[{index}]": one for index, one in enumerate(value)} if isinstance(value, list) else {key: value}
        if parts and all(isinstance(part, LRScheduler) for part in parts.values()):
            for part_name, part in parts.items():
                facts += _walk_scheduler(f"{name}.{part_name}", part)
        else:
            facts.append(f"{title} with {key}={_plain(value)}")
    return facts


def _scheduler_state(scheduler: Any) -> list[tuple[str, Any]]:
    """Returns the state by name: settings first, as they explain what follows from them."""
    if not isinstance(scheduler, LRScheduler):
        return []
    state = {str(key): value for key, value in scheduler.state_dict().items() if key != "verbose"}
    # torch's states have of the schedulers inside not the classes, and nothing of a functools.partial.
    if "_schedulers" in state:
        state["_schedulers"] = getattr(scheduler, "_schedulers", state["_schedulers"])
    if "lr_lambdas" in state and hasattr(scheduler, "lr_lambdas"):
        state["lr_lambdas"] = list(zip(scheduler.lr_lambdas, state["lr_lambdas"], strict=False))
    return sorted(state.items(), key=lambda item: (item[0].startswith("_"), item[0]))


def _plain(value: Any) -> str:
    """Returns a text that is the same on all ranks for options that are the same; of other objects the class alone."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return repr(value.item())
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_plain(one) for one in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_plain(key)}: {_plain(one)}' for key, one in value.items()))}}}"
    if isinstance(value, functools.partial):  # as the schedules of the transformers package are
        return f"partial({_plain(value.func)}, {_plain(value.args)}, {_plain(value.keywords)})"
    return type(value).__qualname__
