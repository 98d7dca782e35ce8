"""Interfaces of mixed precision: dtypes of a model, loss scaling and master weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from booster.core.model_wrapper import ModelWrapper
    from booster.core.optimizer_wrapper import OptimizerWrapper


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
        """Round the masters into the model's parameters, after a step."""
        ...

    def refresh(self) -> None:
        """Copy changed model parameters into the masters.

        A master that still rounds to its model weight keeps its extra digits, so the order of loading weights and
        masters does not matter.
        """
        ...


class MixedPrecision(ABC):
    """Dtypes that a model computes, stores and reduces in.

    `Booster.boost` calls `prepare` on the user's objects before the plugin wraps them, and `configure` on the wrappers
    afterwards. One instance may be used for several models.
    """

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of matrix multiplications, or None for that of the parameters."""

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer updates fp32 master weights of low-precision weights."""
        return False

    def prepare(self, model: nn.Module) -> None:  # noqa: B027
        """Cast parameters or replace modules in place, before the plugin wraps the model. Does nothing by default.

        Args:
            model: The user's model. Its `nn.Parameter` objects must not be replaced: the optimizer holds them.
        """

    def configure(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Set the wrapped model's precision and the optimizer's scaler and masters; return the three."""
        model.precision = self
        return model, optimizer, criterion

    def describe(self) -> str:
        """Return a name for summaries and checkpoints."""
        return type(self).__name__

    def config_fingerprint(self) -> list[str]:
        """Return lines of text that must be equal on all ranks, compared by every boost()."""
        return [f"the mixed precision {self.describe()} in {self.compute_dtype}, keeps_masters={self.keeps_masters}"]

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context of the model's forward."""
        return nullcontext()

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the forward's arguments in the model's dtype; unchanged by default."""
        return args, kwargs

    def convert_outputs(self, outputs: Any) -> Any:
        """Return the forward's outputs in the dtype for the user; unchanged by default."""
        return outputs
