"""The norm of gradients in any number format, and whether all of them are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from booster.kernels.flat_buffers import sum_of_squares, takes_sum_of_squares

__all__ = ["any_nonfinite", "gradient_norm"]

# Note [One decision]
# Whether a step is skipped is decided by all ranks of the world together, of all axes of a mesh, from every gradient
# that any of them holds, also from those that others should hold alike. A rank that steps where others skip has other
# weights from then on, another loss scale, and soon other communication: so a rank where memory, a hook or a parameter
# that was left out of the averaging made a difference must not be asked alone.


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


@torch.no_grad()
def any_nonfinite(gradients: Sequence[torch.Tensor]) -> bool:
    """Returns whether an element is inf or nan.

    Args:
        gradients: Sparse ones may be among them.
    """
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    dense = [gradient for gradient in dense if gradient.numel() > 0]
    if not dense:
        return False
    if takes_sum_of_squares(dense):
        return not math.isfinite(sum_of_squares(dense))
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(dense, float("inf"))])
    return not bool(torch.isfinite(largest).all())
