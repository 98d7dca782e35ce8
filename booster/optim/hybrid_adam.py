"""Adam for parameters wherever they are."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from booster.optim.adam import AdamBase
from booster.optim.offload.settings import OffloadSettings

__all__ = ["HybridAdam"]


class HybridAdam(AdamBase):
    """Adam and AdamW that update each parameter where it is: on the CPU by `CPUAdam`'s kernel, elsewhere by torch's.

    The accelerators compute at the same time as the CPU. On them, states have their parameter's format.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        bias_correction: Whether the moments' start at zero is corrected for.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        adamw_mode: True: AdamW's decoupled weight decay; False: Adam's, which is part of the gradient.
        nvme_offload_fraction: As `CPUAdam`'s, of the states of parameters on the CPU.
        nvme_offload_dir: As `CPUAdam`'s.

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
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adamw_mode=adamw_mode,
            offload=OffloadSettings.checked(nvme_offload_fraction, nvme_offload_dir),
        )
