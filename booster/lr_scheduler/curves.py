"""Closed forms of learning rate schedules: the learning rate after a number of steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor

__all__ = ["LearningRate", "cosine_annealing", "linear_warmup", "multi_step_decay", "polynomial_decay"]

LearningRate = float | Tensor


def linear_warmup(base_lr: LearningRate, step: int, num_steps: int) -> LearningRate:
    """Linear warmup: base / n, 2 base / n, ..., base."""
    return base_lr * ((step + 1) / num_steps)


def cosine_annealing(base_lr: LearningRate, step: int, num_steps: int, eta_min: float) -> LearningRate:
    """Cosine annealing from `base_lr` at step 0 to `eta_min` at step `num_steps`."""
    return eta_min + (base_lr - eta_min) * (1 + math.cos(math.pi * step / num_steps)) / 2


def polynomial_decay(base_lr: LearningRate, step: int, num_steps: int, end_lr: float, power: float) -> LearningRate:
    """Polynomial decay from `base_lr` at step 0 to `end_lr` at step `num_steps`."""
    left: float = (1 - step / num_steps) ** power
    return end_lr + (base_lr - end_lr) * left


def multi_step_decay(base_lr: LearningRate, step: int, milestones: Sequence[int], gamma: float) -> LearningRate:
    """Decay by `gamma` at each milestone up to this step."""
    return base_lr * gamma ** bisect_right(milestones, step)
