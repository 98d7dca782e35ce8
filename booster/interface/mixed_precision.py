"""Interface of mixed precision: dtypes that a model computes, stores and reduces in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.deprecation import ConfigFingerprint


class MixedPrecision(ConfigFingerprint, ABC):
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

    def prepare(self, model: nn.Module) -> Any:
        """Cast parameters or replace modules in place, before the plugin wraps the model. Does nothing by default.

        Args:
            model: The user's model. Its `nn.Parameter` objects must not be replaced: the optimizer holds them.

        Returns:
            What `configure` needs to know about the model, such as the values before the cast, or None.
        """

    def configure(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper | None,
        criterion: Callable[..., Any] | None,
        prepared: Any = None,
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Set the wrapped model's precision and the optimizer's scaler and masters; return the three.

        `prepared` is the result of `prepare`.
        """
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
