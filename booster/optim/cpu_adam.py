"""Adam for parameters on the CPU."""

from __future__ import annotations

from torch import Tensor

from booster.errors import ConfigError
from booster.optim.hybrid_adam import HybridAdam

__all__ = ["CPUAdam"]


class CPUAdam(HybridAdam):
    """Adam and AdamW for parameters on the CPU, in one pass over memory; states may live on a disk.

    Args:
        params: Tensors on the CPU, or param groups of such.
        lr: Learning rate.
        bias_correction: Whether the moments' start at zero is corrected for.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        adamw_mode: True: AdamW's decoupled weight decay; False: Adam's, which is part of the gradient.
        nvme_offload_fraction: How much of the states, in bytes, is in a file on a disk, from 0 to 1. It is read and
            written in every step while others are computed; results are the same. Memory: 48 MiB.
        nvme_offload_dir: Where the file is, twice the states' size, until the optimizer or the process ends; None: the
            system's directory for temporary files.

    Raises:
        ConfigError: An argument that can't work, or a parameter that is not on the CPU.
    """

    def _check_parameter(self, parameter: Tensor) -> None:
        super()._check_parameter(parameter)
        if not parameter.is_cpu:
            raise ConfigError(
                f"CPUAdam got a parameter of shape {tuple(parameter.shape)} on {parameter.device}: use HybridAdam,"
                " which updates each parameter where it is, or move the model to the CPU"
            )
