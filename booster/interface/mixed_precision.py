"""What a number format does to a model and its optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from booster.interface.model import ModelWrapper
    from booster.interface.optimizer import OptimizerWrapper

__all__ = ["LossScaler", "MasterWeights", "MixedPrecision"]


class LossScaler(Protocol):
    """The factor that the loss is multiplied with, and the rule by which it changes.

    The optimizer wrapper reads `scale` when it multiplies a loss, divides the gradients by that same number, decides
    whether the step is skipped, and calls `update` only then.
    """

    @property
    def scale(self) -> float:
        """The factor for losses of the current window."""
        ...

    def update(self, found_nonfinite: bool) -> None:
        """Adapts the factor after a step was taken (False) or skipped (True)."""
        ...

    def state_dict(self) -> dict[str, float | int]:
        """Returns what `load_state_dict` needs to go on exactly."""
        ...

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Takes over what `state_dict` returned."""
        ...


class MasterWeights(Protocol):
    """fp32 copies that the optimizer updates in place of a model's low-precision parameters."""

    def working_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the model's parameter for one of the optimizer's (itself where there is no copy)."""
        ...

    def take_gradients(self) -> None:
        """Gives every master the gradient of its working parameter, in fp32; None where there is none."""
        ...

    def write_working(self) -> None:
        """Rounds the masters into the working parameters, after a step."""
        ...

    def refresh(self) -> None:
        """Takes over working parameters that were changed from outside; a master that still rounds to its working
        value keeps its extra digits, so the order of loading weights and masters does not matter."""
        ...


class MixedPrecision(ABC):
    """Which number formats a model computes, keeps and reduces in.

    `Booster.boost` calls `prepare` on the user's own objects before the plugin wraps them, and `configure` on the
    wrappers afterwards. An instance may serve several models.
    """

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype | None:
        """The format of the matrix multiplications; None where it is the parameters' own."""

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of low-precision weights."""
        return False

    def prepare(self, model: nn.Module) -> None:  # noqa: B027
        """Casts parameters or replaces modules in place, before the plugin wraps the model. Default: nothing.

        Args:
            model: The user's model. Its `nn.Parameter` objects must stay the same ones: the optimizer holds them.
        """

    def configure(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Gives the wrapped model its forward context, the optimizer its scaler and masters; returns the three."""
        model.precision = self
        return model, optimizer, criterion

    def describe(self) -> str:
        """Returns a name for summaries and checkpoints."""
        return type(self).__name__

    def agreement_facts(self) -> list[str]:
        """Returns lines of text that must be the same on all ranks; compared by every boost()."""
        return [f"the mixed precision {self.describe()} in {self.compute_dtype}, keeps_masters={self.keeps_masters}"]

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Returns the context that the model's forward runs in."""
        return nullcontext()

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the forward's arguments in the format that the model takes. Default: as they are."""
        return args, kwargs

    def convert_outputs(self, outputs: Any) -> Any:
        """Returns the forward's outputs in the format that the user gets. Default: as they are."""
        return outputs
