"""Checks of boosted objects, and of the arguments of boost(): on each rank, and between ranks."""

from __future__ import annotations

import functools
import platform
import sys
import weakref
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .comm import check_same_across_ranks, group_size, is_fake_world
from .core.activation_policy import POLICY
from .core.plain_torch import TRAINED_CRITERION_ADVICE
from .data import check_can_shard
from .data.prepare import loader_fingerprint
from .errors import ConfigError
from .interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin
from .version import __version__

# The user's objects that are boosted: boosting them again would average gradients twice.
_boosted: weakref.WeakSet[Any] = weakref.WeakSet()

_models_of: weakref.WeakKeyDictionary[Plugin, weakref.WeakSet[ModelWrapper]] = weakref.WeakKeyDictionary()
_closed: weakref.WeakSet[Plugin] = weakref.WeakSet()


def check_can_boost(
    model: Any, optimizer: Any | None, criterion: Any | None, dataloader: Any | None, lr_scheduler: Any | None
) -> None:
    """Raise `ConfigError` if the arguments cannot be boosted together on this rank. No communication."""
    _check_model(model, optimizer)
    tensors = _named_tensors(model)
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{name!r} belongs to one of torch's lazy modules and has no shape yet: run the model once, on a batch"
                " of any size, before boost()"
            )
    if optimizer is not None:
        _check_optimizer_argument(optimizer, {id(tensor) for _, tensor in tensors}, criterion)
        _check_optimizer_trains(model, optimizer)
    if criterion is not None and not callable(criterion):
        raise ConfigError(
            f"boost() got a criterion of type {type(criterion).__name__}, which is not callable: give a loss such as"
            " torch.nn.MSELoss(), or leave it out"
        )
    if dataloader is not None and not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"dataloader is a {type(dataloader).__name__}, not a torch DataLoader: give one, or leave it out and loop"
            " over your own batches, different ones on each rank"
        )
    if lr_scheduler is not None:
        _check_scheduler_argument(lr_scheduler, optimizer)


def mark_boosted(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Record that these are boosted: `check_can_boost` refuses them from now on."""
    _boosted.add(model)
    if optimizer is not None:
        _boosted.add(optimizer)


def register_model(plugin: Plugin, model: Any, optimizer: Any | None) -> None:
    """Record a boosted model, which `mark_closed` closes; raise `ConfigError` if `configure` returned no wrappers."""
    for name, value, wrapper in (("model", model, ModelWrapper), ("optimizer", optimizer, OptimizerWrapper)):
        if not (isinstance(value, wrapper) or (value is None and name == "optimizer")):
            raise ConfigError(
                f"{type(plugin).__name__} returned a {type(value).__name__} as the boosted {name}: its configure() or"
                f" _wrap() must return a {wrapper.__name__} around it"
            )
    _models_of.setdefault(plugin, weakref.WeakSet()).add(model)


def mark_closed(plugin: Plugin) -> None:
    """Mark a plugin, and the models that it has boosted, as closed."""
    _closed.add(plugin)
    for model in _models_of.pop(plugin, ()):
        model.mark_closed()


def is_closed(plugin: Plugin) -> bool:
    """Return whether a Booster of this plugin is closed."""
    return plugin in _closed


def _check_model(model: Any, optimizer: Any | None) -> None:
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise ConfigError(
            f"boost() was given a {type(model).__name__} first and a {type(optimizer).__name__} second, so model and"
            " optimizer look swapped: write boost(model, optimizer)"
        )
    if isinstance(model, type):
        raise ConfigError(
            f"boost() was given the class {model.__name__} in place of a model: pass an instance, as"
            f" {model.__name__}(...)"
        )
    if isinstance(model, ModelWrapper) or (isinstance(model, nn.Module) and model in _boosted):
        raise ConfigError(
            f"boost() was given a model that is boosted already ({type(model).__name__}): boost each model once and"
            " keep the result. To go on with another optimizer, write booster.save_model(), boost a new model with it,"
            " and booster.load_model() into that"
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"boost() was given a model of type {type(model).__name__}: it must be a torch.nn.Module")


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    # one traversal: it costs more than the work per tensor
    return [
        (f"{prefix}.{key}" if prefix else key, tensor)
        for prefix, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]


def _check_optimizer_argument(optimizer: Any, known: Collection[int], criterion: Any | None) -> None:
    if isinstance(optimizer, OptimizerWrapper) or (isinstance(optimizer, Optimizer) and optimizer in _boosted):
        raise ConfigError(
            "boost() was given an optimizer that is boosted already: boost each optimizer once, together with its model"
        )
    if isinstance(optimizer, type):
        raise ConfigError(
            f"boost() was given the class {optimizer.__name__} in place of an optimizer: pass an instance, as"
            f" {optimizer.__name__}(model.parameters(), ...)"
        )
    if isinstance(optimizer, (list, tuple)) and optimizer and all(isinstance(one, Optimizer) for one in optimizer):
        raise ConfigError(
            f"boost() was given a {type(optimizer).__name__} of optimizers, and a model has one: give"
            " one with a param group for each part (booster.optim.Muon has AdamW for the groups with use_muon=False),"
            " or boost the parts of the model one by one, each with its optimizer"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"boost() was given an optimizer of type {type(optimizer).__name__}: it must be a torch.optim.Optimizer"
        )
    foreign = {
        id(parameter): f"group {index}, shape {tuple(parameter.shape)}"
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in known
    }
    if foreign:
        listed = "; ".join([*foreign.values()][:5]) + ("; ..." if len(foreign) > 5 else "")
        if isinstance(criterion, nn.Module) and any(id(parameter) in foreign for parameter in criterion.parameters()):
            raise ConfigError(
                f"{len(foreign)} parameters of the optimizer are the criterion's, not the model's ({listed}), and"
                f" {TRAINED_CRITERION_ADVICE}"
            )
        raise ConfigError(
            f"{len(foreign)} parameters of the optimizer are not the model's ({listed}): build the optimizer from"
            " model.parameters() of the model that is passed with it"
        )


def _check_optimizer_trains(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that the optimizer was not built before the parameters that train: adapters of LoRA, or a new head."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.requires_grad for parameter in given):
        return
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trained:
        raise ConfigError(
            f"none of the optimizer's {len(given)} parameters trains (requires_grad is False), and {len(trained)}"
            f" others of the model do, such as {trained[0]!r}: build the optimizer after parameters are"
            " frozen or added, as by enable_lora(): AdamW([one for one in model.parameters() if one.requires_grad])"
        )


def _check_scheduler_argument(lr_scheduler: Any, optimizer: Any | None) -> None:
    if not callable(getattr(lr_scheduler, "step", None)):
        raise ConfigError(
            f"boost() got an lr_scheduler of type {type(lr_scheduler).__name__}, which has no step(): give one such as"
            " torch.optim.lr_scheduler.StepLR(optimizer, 1), or leave it out"
        )
    theirs = lr_scheduler.optimizer if isinstance(lr_scheduler, LRScheduler) else None
    if theirs is not None and optimizer is None:
        raise ConfigError(
            f"boost() was given a {type(lr_scheduler).__name__} without its optimizer, whose learning rates it sets:"
            " pass the optimizer too, or leave the scheduler out"
        )
    if theirs is not None and theirs is not optimizer:
        raise ConfigError(
            f"the {type(lr_scheduler).__name__} was built on another optimizer than the one passed to boost(): build it"
            " on this one"
        )


def check_boosted_model(model: Any, caller: str) -> ModelWrapper:
    """Return the model if it is boosted, else raise ConfigError."""
    if not isinstance(model, ModelWrapper):
        raise ConfigError(
            f"{caller}() was given an object of class {type(model).__name__} in place of the boosted model: pass the"
            " model that boost() returned"
        )
    model.require_open()
    return model


def check_boosted_optimizer(optimizer: Any, caller: str) -> OptimizerWrapper:
    """Return the optimizer if it is boosted, else raise ConfigError."""
    if not isinstance(optimizer, OptimizerWrapper):
        raise not_boosted_error(optimizer, caller)
    optimizer.model.require_open()
    return optimizer


def not_boosted_error(optimizer: Any, caller: str) -> ConfigError:
    """Return the error for an optimizer that is not boosted."""
    return ConfigError(
        f"{caller}() was given a {type(optimizer).__name__} that is not boosted: pass the optimizer that boost()"
        " returned"
    )


def check_optimizer(optimizer: Any, caller: str) -> OptimizerWrapper | Optimizer:
    """Return the optimizer if it is boosted, or a plain one that is not; else raise ConfigError."""
    if isinstance(optimizer, Optimizer) and optimizer not in _boosted:
        return optimizer  # an OptimizerWrapper is an Optimizer, too
    return check_boosted_optimizer(optimizer, caller)


def check_stateful_loader(dataloader: Any, caller: str) -> Any:
    """Return the dataloader if it is stateful, else raise ConfigError."""
    if not (hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")):
        raise ConfigError(
            f"{caller}() was given a {type(dataloader).__name__} without a position to save: pass the loader that"
            " boost() or prepare_dataloader() returned"
        )
    return dataloader


def check_scheduler(lr_scheduler: Any, caller: str) -> Any:
    """Return the scheduler if it has a state to save, else raise ConfigError."""
    methods = ("step", "state_dict", "load_state_dict")  # a stateful dataloader has no step
    if isinstance(lr_scheduler, Optimizer) or not all(hasattr(lr_scheduler, method) for method in methods):
        raise ConfigError(
            f"{caller}() was given a {type(lr_scheduler).__name__}, which is not an LR scheduler: pass one such as"
            " torch.optim.lr_scheduler.StepLR(optimizer, 1)"
        )
    return lr_scheduler


# Note [Fingerprint contents]
# Everything that decides which collectives ranks call, and on which tensors, is compared: versions, strategy, dtypes,
# parameters, the optimizer, the state of its scheduler, and how a loader's samples are split over the ranks. Left out
# is everything that may differ: the device, the values of parameters (the plugin broadcasts rank 0's), whether
# parameters are on the meta device, process groups as objects, functions, and the samples of a loader with the user's
# own sampler (see join_uneven()). Versions are those of installed packages, not of imported ones.


def verify_same_across_ranks(
    plugin: Plugin,
    mixed_precision: MixedPrecision | None,
    model: Any,
    optimizer: Any | None,
    criterion: Any | None,
    dataloader: Any | None,
    lr_scheduler: Any | None,
    *,
    compile_options: Mapping[str, Any] | None = None,
) -> Any:
    """Check the arguments of boost() on all ranks; return the result of `plugin.check`.

    Collective: the first collective of boost(). Nothing is changed.

    Raises:
        ConfigError: They cannot be boosted together; on all ranks if on any.
        DesyncError: The ranks' arguments differ; the message names the ranks, and the first difference.
    """
    error: Exception | None = None
    checked: Any = None
    fingerprint: list[str] = []
    try:
        check_can_boost(model, optimizer, criterion, dataloader, lr_scheduler)
        checked = plugin.check(model, optimizer)
        if dataloader is not None:
            check_can_shard(dataloader, plugin.dp_rank, plugin.dp_size)
        if group_size() > 1 and not is_fake_world():
            fingerprint = boost_fingerprint(plugin, mixed_precision, model, optimizer)
            fingerprint += ["no compile"] if compile_options is None else _compile_fingerprint(compile_options)
            fingerprint += ["no lr_scheduler"] if lr_scheduler is None else _scheduler_fingerprint(lr_scheduler)
            fingerprint += ["no criterion" if criterion is None else "a criterion"]
            fingerprint += ["no dataloader"] if dataloader is None else loader_fingerprint(dataloader)
    except Exception as raised:  # raised again on all ranks
        error = raised
    check_same_across_ranks("boost()", fingerprint, error=error)
    return checked


def boost_fingerprint(
    plugin: Plugin, mixed_precision: MixedPrecision | None, model: nn.Module, optimizer: Optimizer | None
) -> list[str]:
    """Return lines about plugin, model and optimizer that must be equal; see Note [Fingerprint contents].

    The most explanatory lines come first, as errors report the first difference: with another model the optimizer
    differs, too.
    """
    model_fingerprint, names = _model_fingerprint(model)
    precision = ["no mixed precision"] if mixed_precision is None else mixed_precision.config_fingerprint()
    is_of_transformers = "transformers" in sys.modules and any(
        type(module).__module__.startswith("transformers.") for module in model.modules()
    )
    return [
        *(f"{name} {number}" for name, number in installed_versions(is_of_transformers).items()),
        f"the plugin {type(plugin).__qualname__}",
        *(f"{type(plugin).__qualname__} with {line}" for line in plugin.config_fingerprint()),
        *precision,
        *model_fingerprint,
        *(["no optimizer"] if optimizer is None else _optimizer_fingerprint(names, optimizer)),
    ]


@functools.cache
def installed_versions(with_transformers: bool = False) -> dict[str, str]:
    """Return the versions of torch and other relevant packages, and of Python without its patch level."""
    packages = ["numpy", "safetensors", *(["transformers"] if with_transformers else [])]
    own = {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    return own | {"torch-booster": __version__} | {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# The model.


def _model_fingerprint(model: nn.Module) -> tuple[list[str], dict[int, str]]:
    """Return a line for every name of a parameter or buffer, in the model's order, and by `id` the first names.

    A line for every layer with an activation policy follows.
    """
    # One traversal of the modules: it costs more than the work per tensor.
    parameters: list[str] = []
    buffers: list[str] = []
    policies: list[str] = []
    first_names: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if POLICY in vars(module):
            policies.append(f"{prefix}: {vars(module)[POLICY].fingerprint}")
        for tensors, lines in ((module._parameters, parameters), (module._buffers, buffers)):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                first = first_names.setdefault(id(tensor), name)
                if first is not name:
                    lines.append(f"{name}: tied to {first}")
                else:
                    kind = "(a buffer)" if lines is buffers else f"requires_grad={tensor.requires_grad}"
                    lines.append(f"{name}: {tuple(tensor.shape)} {tensor.dtype} {kind}")
    return parameters + buffers + policies, first_names


def _compile_fingerprint(options: Mapping[str, Any]) -> list[str]:
    """Return a line for every argument of torch.compile; a backend that is a function by its name."""
    named = {name: getattr(value, "__qualname__", value) for name, value in sorted(options.items())}
    return [f"compile with {name}={value!r}" for name, value in named.items()] or ["compile with defaults"]


# The optimizer.


def _optimizer_fingerprint(names: Mapping[int, str], optimizer: Optimizer) -> list[str]:
    """Return lines about the class, and the parameters and options of each param group."""
    lines = [f"the optimizer {type(optimizer).__qualname__}", f"{len(optimizer.param_groups)} param groups"]
    for index, group in enumerate(optimizer.param_groups):
        members = ", ".join(names[id(parameter)] for parameter in group["params"])
        lines.append(f"param groups with {members or 'nothing'} in group {index}")
        plain = {key: _plain(value) for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        lines += [f"param groups with {key}={value} in group {index}" for key, value in plain.items()]
    return lines


# The scheduler.


def _scheduler_fingerprint(scheduler: Any) -> list[str]:
    """Return lines about the class, and the plain values of its state if it is one of torch's."""
    try:
        return _walk_scheduler("the lr_scheduler", scheduler)
    except Exception:  # user code in state_dict() or in a value failed, and boost() does not need it
        return [f"the lr_scheduler {type(scheduler).__qualname__}"]


def _walk_scheduler(name: str, scheduler: Any) -> list[str]:
    title = f"{name} {type(scheduler).__qualname__}"
    lines = [title]
    for key, value in _scheduler_state(scheduler):
        values = (
            {f"{key}[{index}]": one for index, one in enumerate(value)} if isinstance(value, list) else {key: value}
        )
        if values and all(isinstance(inner, LRScheduler) for inner in values.values()):
            for inner_name, inner in values.items():
                lines += _walk_scheduler(f"{name}.{inner_name}", inner)
        else:
            lines.append(f"{title} with {key}={_plain(value)}")
    return lines


def _scheduler_state(scheduler: Any) -> list[tuple[str, Any]]:
    """Return the state by name, settings first."""
    if not isinstance(scheduler, LRScheduler):
        return []
    state = {str(key): value for key, value in scheduler.state_dict().items() if key != "verbose"}
    # torch's states lack the classes of inner schedulers, and functools.partial objects.
    if "_schedulers" in state:
        state["_schedulers"] = getattr(scheduler, "_schedulers", state["_schedulers"])
    if "lr_lambdas" in state and hasattr(scheduler, "lr_lambdas"):
        state["lr_lambdas"] = list(zip(scheduler.lr_lambdas, state["lr_lambdas"], strict=False))
    return sorted(state.items(), key=lambda item: (item[0].startswith("_"), item[0]))


def _plain(value: Any) -> str:
    """Return a text that is equal on all ranks for equal options; the class name for other objects."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return repr(value.item())
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_plain(one) for one in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_plain(key)}: {_plain(one)}' for key, one in value.items()))}}}"
    if isinstance(value, functools.partial):  # such as the schedules of transformers
        return f"partial({_plain(value.func)}, {_plain(value.args)}, {_plain(value.keywords)})"
    return type(value).__qualname__


# Some mistakes on one rank raise no error at once: another learning rate, or a step that one rank leaves out while no
# rank communicates in it. The training then differs from that of one process. A save compares values that prove it, in
# the message that it sends anyway. States of schedulers are compared by their effects only: one that reads the local
# loss has another state on each rank, which may change nothing.


def training_fingerprint(optimizers: Mapping[str, Any], lr_schedulers: Mapping[str, Any] | None = None) -> list[str]:
    """Return lines of text that must be equal on all ranks.

    Args:
        optimizers: Optimizers by name. Those that are not boosted may differ between ranks and are skipped.
        lr_schedulers: Schedulers by name.
    """
    lines: list[str] = []
    for name, optimizer in optimizers.items():
        if isinstance(optimizer, OptimizerWrapper):
            title = f"the optimizer {name!r}" if name else "the optimizer"
            lines.append(f"{title} with {optimizer.num_steps} steps since boost()")
            lines.append(f"{title} with {optimizer.num_skipped_steps} skipped steps")
            for index, group in enumerate(optimizer.param_groups):
                rate = group.get("lr")
                rate = rate.item() if isinstance(rate, torch.Tensor) and rate.numel() == 1 else rate
                lines.append(f"{title} with lr={rate!r} in group {index}")
    for name, scheduler in (lr_schedulers or {}).items():
        steps = getattr(scheduler, "last_epoch", None)
        if isinstance(steps, int):
            lines.append(f"the scheduler{f' {name!r}' if name else ''} after {steps} steps")
    return lines
