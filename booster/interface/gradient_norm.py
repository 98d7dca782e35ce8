"""The norm of gradients in any number format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from booster.kernels.flat_buffers import sum_of_squares, takes_sum_of_squares

__all__ = ["gradient_norm"]


@torch.no_grad()
def gradient_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Returns the norm of all elements together, as a 0-dim fp32 or fp64 tensor on the gradients' device.

    Args:
        gradients: Low precision is summed in fp32.
        norm_type: Order of the norm, `float("inf")` included.
    """
    if norm_type == 2.0 and takes_sum_of_squares(gradients):
        return torch.tensor(math.sqrt(sum_of_squares(gradients)), dtype=torch.float32)
    wide = [one.float() if one.dtype in (torch.float16, torch.bfloat16) else one for one in gradients]
    return nn.utils.get_total_norm(wide, norm_type)
