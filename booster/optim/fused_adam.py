"""Adam by torch's fused kernels on accelerators, and by our own on the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from booster.optim.adam import AdamBase
from booster.optim.offload.settings import OffloadSettings

__all__ = ["FusedAdam"]


class FusedAdam(AdamBase):
    """Adam and AdamW with one kernel call for many parameters, and all states with their parameters.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        bias_correction: Whether the moments' start at zero is corrected for.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        adamw_mode: True: AdamW's decoupled weight decay; False: Adam's, which is part of the gradient.
        weight_decay: Weight decay.

    Raises:
        ConfigError: An argument that can't work.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adamw_mode=adamw_mode,
            offload=OffloadSettings(),
        )
