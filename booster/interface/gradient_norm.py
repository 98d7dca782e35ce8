"""Norm of gradients in any dtype, and the check that all of them are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from booster.kernels.flat_buffers import sum_of_squares, takes_sum_of_squares

__all__ = ["any_nonfinite", "gradient_norm"]

# Note [Skip decision]
# All ranks of the world, of all axes of a mesh, decide together whether a step is skipped, from every gradient of every
# rank, also from those that should be equal on several ranks. A rank that steps where others skip would have other
# weights, another loss scale, and soon other collectives. So no rank decides alone: bad memory, a hook or a parameter
# outside of the averaging may make its gradients differ.


@torch.no_grad()
def gradient_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all elements, as a 0-dim fp32 or fp64 tensor on the gradients' device.

    Args:
        gradients: Gradients; low-precision ones are summed in fp32.
        norm_type: Order of the norm; may be `float("inf")`.
    """
    if norm_type == 2.0 and takes_sum_of_squares(gradients):
        return torch.tensor(math.sqrt(sum_of_squares(gradients)), dtype=torch.float32)
    wide = [one.float() if one.dtype in (torch.float16, torch.bfloat16) else one for one in gradients]
    return nn.utils.get_total_norm(wide, norm_type)


@torch.no_grad()
def any_nonfinite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether an element is inf or nan.

    Args:
        gradients: Dense or sparse gradients.
    """
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    dense = [gradient for gradient in dense if gradient.numel() > 0]
    if not dense:
        return False
    if takes_sum_of_squares(dense):
        return not math.isfinite(sum_of_squares(dense))
    maxima = torch.stack([norm.float() for norm in torch._foreach_norm(dense, float("inf"))])
    return not bool(torch.isfinite(maxima).all())
