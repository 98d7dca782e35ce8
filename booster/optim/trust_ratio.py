"""How long a layer's update may be, compared with its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from booster.optim.whole_parameters import StepBatch

__all__ = ["norms_of_pairs", "ratio_of_norms"]


def norms_of_pairs(batch: StepBatch, others: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns for every step the norm of the whole parameter's weights, and of another tensor of its shape.

    Args:
        batch: Of steps.
        others: A tensor for each of them: the update, or the gradient.

    Collective over the ranks of the batch's shards, if there are any. One all-reduce.
    """
    squares = [
        torch.stack([step.sum_of_squares(step.weights), step.sum_of_squares(other)])
        for step, other in zip(batch.steps, others, strict=True)
    ]
    return [(total[0].sqrt(), total[1].sqrt()) for total in batch.sums(squares, lambda shape: 2)]


def ratio_of_norms(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns one norm over another; 1 where either is zero, as of weights that begin at zero."""
    is_usual = (numerator > 0) & (denominator > 0)
    return torch.where(is_usual, numerator / denominator, torch.ones_like(numerator))
