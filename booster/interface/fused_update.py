"""The optimizer that unscales, clips, updates and rounds in one pass over its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["FusedUpdate"]


@runtime_checkable
class FusedUpdate(Protocol):
    """What a plugin may call in place of `step()`, where it would otherwise go over gradients and weights once more."""

    def fused_step(
        self,
        *,
        multiplier: float = 1.0,
        multiplier_tensor: Tensor | None = None,
        working_copies: Mapping[nn.Parameter, Tensor] | None = None,
        gradients: Mapping[nn.Parameter, Tensor] | None = None,
        zero_grads: bool = False,
    ) -> None:
        """Updates the parameters as `step()` would with gradients that were multiplied before; runs the same hooks.

        Args:
            multiplier: What makes the true gradient of the stored one: 1 / loss scale, 1 / ranks and the like.
            multiplier_tensor: A further factor with one element, in fp32, that the host need not know: a clip
                coefficient.
            working_copies: For parameters that are fp32 masters, the weights that the model computes with: they are
                rounded from the updated masters.
            gradients: Used in place of `parameter.grad` where given; may be in lower precision than the parameter.
            zero_grads: Set the gradients that were used to zero.

        Without `zero_grads` the gradients stay as they are.
        """
        ...
