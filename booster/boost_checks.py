"""Checks of the arguments of boost(), before anything is changed."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .errors import ConfigError
from .interface import ModelWrapper, OptimizerWrapper, Plugin

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
        _check_optimizer_argument(optimizer, {id(tensor) for _, tensor in tensors})
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
    """Record a boosted model of the plugin, which `mark_closed` closes.

    Raises:
        ConfigError: The plugin's `configure` returned something else than wrappers.
    """
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
            " keep the result"
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


def _check_optimizer_argument(optimizer: Any, known: Collection[int]) -> None:
    if isinstance(optimizer, OptimizerWrapper) or (isinstance(optimizer, Optimizer) and optimizer in _boosted):
        raise ConfigError(
            "boost() was given an optimizer that is boosted already: boost each optimizer once, together with its model"
        )
    if isinstance(optimizer, type):
        raise ConfigError(
            f"boost() was given the class {optimizer.__name__} in place of an optimizer: pass an instance, as"
            f" {optimizer.__name__}(model.parameters(), ...)"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"boost() was given an optimizer of type {type(optimizer).__name__}: it must be a torch.optim.Optimizer"
        )
    foreign = [
        f"group {index}, shape {tuple(parameter.shape)}"
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if foreign:
        listed = "; ".join(foreign[:5]) + ("; ..." if len(foreign) > 5 else "")
        raise ConfigError(
            f"{len(foreign)} parameters of the optimizer are not the model's ({listed}): build the optimizer from"
            " model.parameters() of the model that is passed with it"
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
        raise ConfigError(
            f"{caller}() was given a {type(optimizer).__name__} that is not boosted: pass the optimizer that boost()"
            " returned"
        )
    optimizer.model.require_open()
    return optimizer


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
