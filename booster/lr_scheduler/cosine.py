"""Cosine annealing, with and without warmup."""

from __future__ import annotations

from torch.optim import Optimizer, lr_scheduler

from booster.lr_scheduler.checks import check_floor, check_number, check_total_steps, check_warmup_steps
from booster.lr_scheduler.curves import LearningRate, cosine_annealing, linear_warmup
from booster.lr_scheduler.schedule import CurveSchedule, Schedule

__all__ = ["CosineAnnealingLR", "CosineAnnealingWarmupLR"]


class CosineAnnealingLR(Schedule, lr_scheduler.CosineAnnealingLR):
    """Cosine annealing to `eta_min`: torch's CosineAnnealingLR with `T_max=total_steps`, constant afterwards.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, without restarts.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        eta_min: Final learning rate.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "eta_min")

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.eta_min = check_number("eta_min", eta_min)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, self.total_steps, self.eta_min, last_epoch)

    def _check_base_lr(self, base_lr: LearningRate, index: int) -> None:
        check_floor("eta_min", self.eta_min, base_lr, index)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        return cosine_annealing(base_lr, step, self.total_steps, self.eta_min)


class CosineAnnealingWarmupLR(CurveSchedule):
    """Linear warmup to the learning rate, then cosine annealing to `eta_min` over the remaining steps.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate; the step after warmup also has all of it.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        eta_min: Final learning rate.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "warmup_steps", "eta_min")

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self.eta_min = check_number("eta_min", eta_min)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, last_epoch)

    def _check_base_lr(self, base_lr: LearningRate, index: int) -> None:
        check_floor("eta_min", self.eta_min, base_lr, index)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        if step < self.warmup_steps:
            return linear_warmup(base_lr, step, self.warmup_steps)
        return cosine_annealing(base_lr, step - self.warmup_steps, self.total_steps - self.warmup_steps, self.eta_min)
