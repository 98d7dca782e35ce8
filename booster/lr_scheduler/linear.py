"""Linear decay with warmup."""

from __future__ import annotations

from torch.optim import Optimizer

from booster.lr_scheduler.checks import check_total_steps, check_warmup_steps
from booster.lr_scheduler.curves import LearningRate, linear_warmup, polynomial_decay
from booster.lr_scheduler.schedule import CurveSchedule

__all__ = ["LinearWarmupLR"]


class LinearWarmupLR(CurveSchedule):
    """Linear warmup to the learning rate, then linear decay to 0 over the remaining steps.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate, as in all schedulers of this package; the step after
    warmup also has all of it.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    SETTINGS = ("total_steps", "warmup_steps")

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, last_epoch)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        if step < self.warmup_steps:
            return linear_warmup(base_lr, step, self.warmup_steps)
        return polynomial_decay(base_lr, step - self.warmup_steps, self.total_steps - self.warmup_steps, 0.0, 1.0)
