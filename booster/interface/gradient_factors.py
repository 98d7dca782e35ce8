"""Factors that a fused optimizer step multiplies gradients by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["UnscaleFactors"]

# Note [Fused unscaling]
# Unscaling gradients, dividing them by the number of items and clipping them are multiplications by one number each,
# and each would read and write all of them once more: a third of a memory-bound step. An optimizer that is a
# `FusedUpdate` multiplies while it reads the gradients anyway, so they stay scaled and the factors are kept here.
# Readers of unscaled gradients (clipping by value, hooks) have them multiplied first. Only gradients that are invisible
# to users stay scaled: shards, and those of low-precision weights with master weights.

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


@dataclass(slots=True)
class UnscaleFactors:
    """Factors of one accumulation.

    Attributes:
        multiplier: Factor that unscales and averages.
        coefficient: Clip coefficient as a 0-dim tensor (no device sync), or None.
    """

    grad_scale: float = 1.0
    clip_coef: torch.Tensor | None = None

    def unscaled_norm(self, scaled_norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of the unscaled gradients, from that of the scaled ones."""
        norm = scaled_norm * abs(self.grad_scale)
        return norm if self.clip_coef is None else norm * self.clip_coef

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Set the clip coefficient for gradients of this norm and `max_norm`."""
        coefficient = torch.clamp(max_norm / (norm.float() + _EPSILON), max=1.0)
        self.clip_coef = coefficient if self.clip_coef is None else self.clip_coef * coefficient

    @torch.no_grad()
    def apply_to(self, gradients: Sequence[torch.Tensor]) -> None:
        """Multiply the gradients in place."""
        if not gradients:
            return
        if self.grad_scale != 1.0:
            torch._foreach_mul_(list(gradients), self.grad_scale)
        if self.clip_coef is not None:
            torch._foreach_mul_(list(gradients), self.clip_coef)
