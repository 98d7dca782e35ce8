"""Wrappers for plain torch modules and optimizers, so that they can be saved and loaded like boosted ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from booster.errors import CheckpointError, ConfigError
from booster.interface import AccumulatedGradients, ModelWrapper, OptimizerState, OptimizerWrapper, TensorSlice

# A boosted optimizer's states are named after the model's parameters. A plain optimizer has names only if it was built
# from them, `AdamW(model.named_parameters())`; then its checkpoint equals that of a boosted one. Otherwise the name is
# the index over all groups, as in torch's state_dict, and matches only an optimizer that is built the same way.


def as_model_wrapper(model: nn.Module, *, is_primary: bool) -> ModelWrapper:
    """Return a boosted model unchanged, and wrap any other module.

    Args:
        model: Model.
        is_primary: Whether this rank's values of a plain module are written.

    Raises:
        ConfigError: `model` is not a module.
    """
    if isinstance(model, ModelWrapper):
        return model
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} was given for the model: give the one that boost() returned, or a"
            " torch.nn.Module"
        )
    return _PlainModel(model, is_primary=is_primary)


class _PlainModel(ModelWrapper):
    """Plain module: replicated on every rank, with values that may differ between ranks."""

    def tensor_slices(self) -> list[TensorSlice]:
        return [replace(tensor_slice, shared=False) for tensor_slice in super().tensor_slices()]


def as_optimizer_wrapper(optimizer: OptimizerWrapper | Optimizer, *, is_primary: bool) -> OptimizerWrapper:
    """Return a boosted optimizer unchanged, and wrap any other.

    Args:
        optimizer: Optimizer.
        is_primary: Whether this rank's state of a plain optimizer is written.

    Raises:
        ConfigError: `optimizer` is not an optimizer.
    """
    if isinstance(optimizer, OptimizerWrapper):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"a {type(optimizer).__name__} was given for the optimizer: give the one that boost() returned, or a"
            " torch.optim.Optimizer"
        )
    return _PlainOptimizer(optimizer, is_primary)


class _PlainOptimizer(OptimizerWrapper):
    """Plain optimizer: replicated on every rank."""

    def __init__(self, optim: Optimizer, is_primary: bool) -> None:
        super().__init__(optim, _NamedParameters(optim, is_primary), is_primary=is_primary)

    def checkpoint_state(self) -> OptimizerState:
        return _PlainState(self)

    def pending_gradients(self) -> AccumulatedGradients:
        return _UnmanagedGradients(self)


class _UnmanagedGradients(AccumulatedGradients):
    """Gradients of a plain optimizer. Without `booster.backward` their accumulation is unknown: they are left alone."""

    @property
    def has_gradients(self) -> bool:
        return False

    def clear(self) -> None:
        """Do nothing."""


class _PlainState(OptimizerState):
    def slices(self) -> list[TensorSlice]:
        # Plain optimizers are not synchronized between ranks: only the primary rank's state is written.
        return [replace(tensor_slice, shared=False) for tensor_slice in super().slices()]


class _NamedParameters(ModelWrapper):
    """Parameters of a plain optimizer as a model; stored fp32 master weights are loaded into them."""

    def __init__(self, optim: Optimizer, is_primary: bool) -> None:
        super().__init__(nn.Module(), is_primary=is_primary)
        named: dict[str, nn.Parameter] = {}
        number = 0
        for group in optim.param_groups:
            names = group.get("param_names", [None] * len(group["params"]))
            for name, parameter in zip(names, group["params"], strict=True):
                named[str(number) if name is None else name] = parameter
                number += 1
        self.__dict__["_named"] = named  # not registered: names may contain dots

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()

    def tensor_slices(self) -> list[TensorSlice]:
        return [
            TensorSlice.full(name, parameter.detach(), primary=self._is_primary, shared=False)
            for name, parameter in self._named.items()
        ]


def scheduler_document(lr_scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's class name and state dict."""
    return {"scheduler": type(lr_scheduler).__name__, "state": lr_scheduler.state_dict()}


def scheduler_state(document: Any, lr_scheduler: Any, path: Path) -> dict[str, Any]:
    """Return the state dict in the output of `scheduler_document`.

    Raises:
        CheckpointError: Malformed, or of another scheduler class.
        ConfigError: The scheduler rejects the state because it was built with other settings.
    """
    state = document.get("state") if isinstance(document, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no scheduler state: give a file that save_lr_scheduler wrote")
    name = type(lr_scheduler).__name__
    if document.get("scheduler") != name:
        raise CheckpointError(
            f"{path} holds the state of a {document.get('scheduler')!s:.80}, not of a {name}: build the scheduler"
            " that was saved"
        )
    check = getattr(lr_scheduler, "check_state_dict", None)
    if check is not None:  # before models and optimizers are filled
        check(state)
    return state
