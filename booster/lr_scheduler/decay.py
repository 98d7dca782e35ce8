"""Exponential and step decay."""

from __future__ import annotations

from torch.optim import Optimizer, lr_scheduler

from booster.lr_scheduler.checks import check_number, check_steps, check_total_steps
from booster.lr_scheduler.curves import LearningRate
from booster.lr_scheduler.schedule import Schedule

__all__ = ["ExponentialLR", "StepLR"]


class StepLR(Schedule, lr_scheduler.StepLR):
    """torch's StepLR: the learning rate multiplied by `gamma` every `step_size` steps.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, after which the learning rate is constant; not `step_size`.
        step_size: Number of steps between two decays.
        gamma: Decay factor.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    SETTINGS = ("total_steps", "step_size", "gamma")

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.step_size = check_steps("step_size", step_size, 1)
        self.gamma = check_number("gamma", gamma, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, self.step_size, self.gamma, last_epoch)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        return base_lr * self.gamma ** (step // self.step_size)


class ExponentialLR(Schedule, lr_scheduler.ExponentialLR):
    """torch's ExponentialLR: the learning rate multiplied by `gamma` every step.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, after which the learning rate is constant.
        gamma: Decay factor.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    SETTINGS = ("total_steps", "gamma")

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.gamma = check_number("gamma", gamma, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, self.gamma, last_epoch)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        return base_lr * self.gamma**step
