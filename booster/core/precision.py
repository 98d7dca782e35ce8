"""Mixed precision, as the wrappers of model and optimizer use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn


class Precision(ABC):
    """Dtypes of a model's forward; the base of `booster.interface.MixedPrecision`."""

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of matrix multiplications, or None for that of the parameters."""

    def describe(self) -> str:
        """Return a name for summaries and checkpoints."""
        return type(self).__name__

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context of the model's forward."""
        return nullcontext()

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the forward's arguments in the model's dtype; unchanged by default."""
        return args, kwargs

    def convert_outputs(self, outputs: Any) -> Any:
        """Return the forward's outputs in the dtype for the user; unchanged by default."""
        return outputs


class LossScaler(Protocol):
    """Loss scale and its update rule.

    The optimizer wrapper multiplies a loss by `scale`, divides the gradients by it, decides whether the step is
    skipped, and calls `update` only then.
    """

    @property
    def scale(self) -> float:
        """Loss scale of the current accumulation."""
        ...

    def update(self, found_nonfinite: bool) -> None:
        """Update the scale after a step was taken (False) or skipped (True)."""
        ...

    def state_dict(self) -> dict[str, float | int]:
        """Return the state for an exact resume by `load_state_dict`."""
        ...

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Load a result of `state_dict`."""
        ...


class MasterWeights(Protocol):
    """fp32 master weights that the optimizer updates in place of a model's low-precision parameters."""

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the model's parameter for one of the optimizer's (itself if there is no copy)."""
        ...

    def copy_gradients(self) -> None:
        """Copy the gradients of the model's parameters to the masters, in fp32; None where there is none."""
        ...

    def copy_to_model(self) -> None:
        """Round all masters into the model's parameters."""
        ...

    def follow_model(self) -> None:
        """Copy weights into the masters that were modified in place since the last step, except through `.data`."""
        ...

    def end_step(self, *, is_model_updated: bool) -> None:
        """Round the updated masters into the model's parameters, unless the optimizer's step did so."""
        ...

    def refresh(self) -> None:
        """Copy changed model parameters into the masters.

        A master that still rounds to its model weight keeps its extra digits, so the order of loading weights and
        masters does not matter.
        """
        ...
