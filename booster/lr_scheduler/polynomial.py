"""Polynomial decay, with and without warmup."""

from __future__ import annotations

from torch.optim import Optimizer, lr_scheduler

from booster.lr_scheduler.checks import check_floor, check_number, check_total_steps, check_warmup_steps
from booster.lr_scheduler.curves import LearningRate, linear_warmup, polynomial_decay
from booster.lr_scheduler.schedule import CurveSchedule, Schedule

__all__ = ["PolynomialLR", "PolynomialWarmupLR"]


class PolynomialLR(Schedule, lr_scheduler.PolynomialLR):
    """Polynomial decay to `end_lr`; torch's PolynomialLR if `end_lr=0`.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        end_lr: Final learning rate.
        power: Exponent; 1 is linear, and a larger one decays faster at first.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "end_lr", "power")

    def __init__(
        self, optimizer: Optimizer, total_steps: int, end_lr: float = 1e-4, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.end_lr = check_number("end_lr", end_lr)
        self.power = check_number("power", power, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, self.total_steps, self.power, last_epoch)

    def _check_base_lr(self, base_lr: LearningRate, index: int) -> None:
        check_floor("end_lr", self.end_lr, base_lr, index)

    def get_lr(self) -> list[LearningRate]:
        """Return the learning rates of all groups; internal to `step`, users call `get_last_lr`."""
        if self.end_lr == 0 or self._step_count == 1 or self.last_epoch > self.total_steps:
            return super().get_lr()
        # torch's recursion decays to 0: it is applied to the part above `end_lr`.
        left, left_before = (1.0 - step / self.total_steps for step in (self.last_epoch, self.last_epoch - 1))
        factor = (left / left_before) ** self.power
        return [(group["lr"] - self.end_lr) * factor + self.end_lr for group in self.optimizer.param_groups]

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        return polynomial_decay(base_lr, step, self.total_steps, self.end_lr, self.power)


class PolynomialWarmupLR(CurveSchedule):
    """Linear warmup to the learning rate, then polynomial decay to `end_lr`.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate; the step after warmup also has all of it.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        end_lr: Final learning rate.
        power: Exponent; 1 is linear, and a larger one decays faster at first.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "warmup_steps", "end_lr", "power")

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self.end_lr = check_number("end_lr", end_lr)
        self.power = check_number("power", power, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, last_epoch)

    def _check_base_lr(self, base_lr: LearningRate, index: int) -> None:
        check_floor("end_lr", self.end_lr, base_lr, index)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        if step < self.warmup_steps:
            return linear_warmup(base_lr, step, self.warmup_steps)
        num_steps = self.total_steps - self.warmup_steps
        return polynomial_decay(base_lr, step - self.warmup_steps, num_steps, self.end_lr, self.power)
