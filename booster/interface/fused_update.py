"""Interface of optimizers that unscale, clip, update and round in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["FusedUpdate"]


@runtime_checkable
class FusedUpdate(Protocol):
    """Optimizer with a fused step, which saves a plugin separate passes over gradients and weights."""

    def fused_step(
        self,
        *,
        grad_scale: float = 1.0,
        clip_coef: Tensor | None = None,
        model_params: Mapping[nn.Parameter, Tensor] | None = None,
        gradients: Mapping[nn.Parameter, Tensor] | None = None,
        zero_grads: bool = False,
    ) -> None:
        """Update the parameters as `step()` would with unscaled gradients; runs the same hooks.

        Args:
            grad_scale: Factor that unscales the stored gradients: 1 / loss scale, 1 / ranks and the like.
            clip_coef: Further fp32 factor with one element, which is not read on the host: a clip coefficient.
            model_params: Low-precision weights by their fp32 master weights; they are rounded from the updated
                masters.
            gradients: Gradients used in place of `parameter.grad`; may be of lower precision than the parameter.
            zero_grads: If True, set the used gradients to zero; by default they are unchanged.
        """
        ...
