"""Torch modules and optimizers that were never boosted, as the checkpoint engine takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerState, OptimizerWrapper, PendingGradients, TensorSlice

__all__ = ["as_model_wrapper", "as_optimizer_wrapper"]

# Note [Names of a plain optimizer]
# A boosted optimizer's states are named by its model's parameters. A plain one knows names only if it was built from
# them, `AdamW(model.named_parameters())`; then its checkpoint and a boosted one's are alike. Otherwise a parameter's
# name is its number over all groups, as in torch's own state_dict: good for an optimizer that is built the same way.


def as_model_wrapper(model: nn.Module, *, is_primary: bool) -> ModelWrapper:
    """Return a boosted model as it is, and a view of any other module.

    Args:
        model: The model.
        is_primary: Whether this rank's values of a plain module are written.

    Raises:
        ConfigError: It is no module.
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
    """Every rank is taken to hold the model whole, with values of its own."""

    def tensor_slices(self) -> list[TensorSlice]:
        return [replace(part, shared=False) for part in super().tensor_slices()]


def as_optimizer_wrapper(optimizer: OptimizerWrapper | Optimizer, *, is_primary: bool) -> OptimizerWrapper:
    """Return a boosted optimizer as it is, and a view of any other.

    Args:
        optimizer: The optimizer.
        is_primary: Whether this rank's state of a plain optimizer is the one that counts.

    Raises:
        ConfigError: It is no optimizer.
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
    """Every rank is taken to hold the optimizer whole."""

    def __init__(self, optim: Optimizer, is_primary: bool) -> None:
        super().__init__(optim, _NamedParameters(optim, is_primary), is_primary=is_primary)

    def checkpoint_state(self) -> OptimizerState:
        return _PlainState(self)

    def pending_gradients(self) -> PendingGradients:
        return _NobodysGradients(self)


class _NobodysGradients(PendingGradients):
    """Without `booster.backward` nobody knows what a plain optimizer's gradients wait for: they stay the user's."""

    @property
    def is_waiting(self) -> bool:
        return False

    def clear(self) -> None:
        """Leaves them alone."""


class _PlainState(OptimizerState):
    def slices(self) -> list[TensorSlice]:
        # Nobody keeps the ranks' plain optimizers alike: what one rank holds is what counts.
        return [replace(part, shared=False) for part in super().slices()]


class _NamedParameters(ModelWrapper):
    """The optimizer's parameters in the place of a model: fp32 master weights that are stored go into them."""

    def __init__(self, optim: Optimizer, is_primary: bool) -> None:
        super().__init__(nn.Module(), is_primary=is_primary)
        self.__dict__["_named"] = dict(_named_parameters(optim))  # not registered: their names may have dots

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()

    def tensor_slices(self) -> list[TensorSlice]:
        return [
            TensorSlice.whole(name, parameter.detach(), primary=self._is_primary, shared=False)
            for name, parameter in self._named.items()
        ]


def _named_parameters(optim: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    number = 0
    for group in optim.param_groups:
        names = group.get("param_names", [None] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            yield str(number) if name is None else name, parameter
            number += 1
