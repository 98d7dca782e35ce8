"""The norm of a gradient of which every rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from booster.comm import all_reduce_max, all_reduce_sum, collective_device
from booster.kernels.flat_buffers import sum_of_squares, takes_sum_of_squares

__all__ = ["norm_over_ranks"]


@torch.no_grad()
def norm_over_ranks(
    gradients: Sequence[torch.Tensor], norm_type: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Returns the norm of all elements that the ranks of the group hold, as a 0-dim fp32 tensor, equal on all.

    Args:
        gradients: This rank's parts.
        norm_type: Order of the norm, `float("inf")` included.
        group: The ranks among which the gradient is divided, each element on one of them.

    Collective: one small all-reduce. The result stays on the device of the gradients' communication.
    """
    device = collective_device(group)
    if norm_type == 2.0 and takes_sum_of_squares(gradients):
        total = torch.tensor([sum_of_squares(gradients)], dtype=torch.float64, device=device)
        return all_reduce_sum(total, group).sqrt().reshape(()).float()
    norms = torch._foreach_norm(list(gradients), norm_type) if gradients else []  # a rank may own nothing
    stacked = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *(norm.to(device) for norm in norms)])
    if math.isinf(norm_type):
        # A comparison with nan is false, so that a maximum may lose it: it travels as a number of its own.
        facts = torch.stack([stacked.nan_to_num(nan=0.0, posinf=math.inf).max(), stacked.isnan().any().double()])
        largest, has_nan = all_reduce_max(facts, group)
        return torch.where(has_nan > 0, torch.full_like(largest, math.nan), largest).float()
    total = all_reduce_sum(stacked.pow(norm_type).sum().reshape(1), group)
    return total.pow(1.0 / norm_type).reshape(()).float()
