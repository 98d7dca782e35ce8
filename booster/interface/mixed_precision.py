"""Interface of mixed precision: dtypes that a model computes, stores and reduces in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.core.precision import Precision
from booster.deprecation import ConfigFingerprint


class MixedPrecision(ConfigFingerprint, Precision):
    """Dtypes that a model computes, stores and reduces in.

    `Booster.boost` calls `prepare` on the user's objects before the plugin wraps them, and `configure` on the wrappers
    afterwards. One instance may be used for several models.
    """

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

    def config_fingerprint(self) -> list[str]:
        """Return lines of text that must be equal on all ranks, compared by every boost()."""
        return [f"the mixed precision {self.describe()} in {self.compute_dtype}, keeps_masters={self.keeps_masters}"]
