"""What gradients are still to be multiplied with, where the optimizer does that within its own pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["GradientFactors"]

# Note [Gradient factors]
# To unscale gradients, to divide them by the number of items and to clip them are products with one number each, and
# each would read and write all of them once more: of a step that is limited by the memory, a third. An optimizer that
# is a `FusedUpdate` multiplies while it reads the gradients anyway, so they stay raw and the numbers wait here. What
# needs the true gradients themselves (clipping by value, hooks) has them multiplied first. Only gradients that nobody
# but the wrapper sees are left raw: shards, and those of low-precision weights that have masters.

_EPSILON = 1e-6  # as torch.nn.utils.clip_grads_with_norm_


@dataclass(slots=True)
class GradientFactors:
    """The two factors of one window.

    Attributes:
        multiplier: Unscales and averages.
        coefficient: Clips; a 0-dim tensor, so that nobody waits for an accelerator to read it. None: nothing does.
    """

    multiplier: float = 1.0
    coefficient: torch.Tensor | None = None

    def true_norm(self, raw: torch.Tensor) -> torch.Tensor:
        """Returns the norm of the true gradients, from that of the raw ones."""
        norm = raw * abs(self.multiplier)
        return norm if self.coefficient is None else norm * self.coefficient

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Takes note that gradients of this norm are to be scaled down to `max_norm`."""
        coefficient = torch.clamp(max_norm / (norm.float() + _EPSILON), max=1.0)
        self.coefficient = coefficient if self.coefficient is None else self.coefficient * coefficient

    @torch.no_grad()
    def apply_to(self, gradients: Sequence[torch.Tensor]) -> None:
        """Multiplies the gradients in place."""
        if not gradients:
            return
        if self.multiplier != 1.0:
            torch._foreach_mul_(list(gradients), self.multiplier)
        if self.coefficient is not None:
            torch._foreach_mul_(list(gradients), self.coefficient)
