"""Constant learning rate followed by cosine annealing, with and without warmup."""

from __future__ import annotations

from torch.optim import Optimizer

from booster.lr_scheduler.checks import (
    check_floor,
    check_fraction,
    check_number,
    check_total_steps,
    check_warmup_steps,
)
from booster.lr_scheduler.curves import LearningRate, cosine_annealing, linear_warmup
from booster.lr_scheduler.schedule import CurveSchedule

__all__ = ["FlatAnnealingLR", "FlatAnnealingWarmupLR"]


class FlatAnnealingWarmupLR(CurveSchedule):
    """Linear warmup, constant learning rate, then cosine annealing to `eta_min` over the remaining steps.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        pct_start: Fraction of the steps after warmup with a constant learning rate, rounded down to a step.
        eta_min: Final learning rate.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "warmup_steps", "pct_start", "eta_min")

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self.pct_start = check_fraction("pct_start", pct_start, is_one_allowed=False)
        self.eta_min = check_number("eta_min", eta_min)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, last_epoch)

    def _check_base_lr(self, base_lr: LearningRate, index: int) -> None:
        check_floor("eta_min", self.eta_min, base_lr, index)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        if step < self.warmup_steps:
            return linear_warmup(base_lr, step, self.warmup_steps)
        flat_end = self.warmup_steps + int((self.total_steps - self.warmup_steps) * self.pct_start)
        return cosine_annealing(base_lr, max(0, step - flat_end), self.total_steps - flat_end, self.eta_min)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """Constant learning rate, then cosine annealing to 0 over the remaining steps.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        pct_start: Fraction of the steps with a constant learning rate, rounded down to a step.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)
