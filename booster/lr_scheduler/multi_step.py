"""Decay at milestones, with and without warmup."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer, lr_scheduler

from booster.lr_scheduler.checks import (
    check_milestones,
    check_number,
    check_total_steps,
    check_warmup_steps,
)
from booster.lr_scheduler.curves import LearningRate, linear_warmup, multi_step_decay
from booster.lr_scheduler.schedule import CurveSchedule, Schedule

__all__ = ["MultiStepLR", "MultiStepWarmupLR"]


class MultiStepLR(Schedule, lr_scheduler.MultiStepLR):
    """torch's MultiStepLR: the learning rate multiplied by `gamma` at each milestone.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        milestones: Steps in ascending order, at least one; a repeated step counts twice.
        gamma: Decay factor.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a milestone is out of range.
    """

    SETTINGS = ("total_steps", "milestones", "gamma")

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Iterable[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        steps = check_milestones(milestones, self.total_steps)
        self.gamma = check_number("gamma", gamma, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, steps, self.gamma, last_epoch)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        return multi_step_decay(base_lr, step, sorted(self.milestones.elements()), self.gamma)


class MultiStepWarmupLR(CurveSchedule):
    """Linear warmup to the learning rate, which is then multiplied by `gamma` at each milestone.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        milestones: Steps in ascending order, counted from the start of the run; at least one, none within warmup. A
            repeated step counts twice.
        gamma: Decay factor.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a milestone is out of range or within warmup.
    """

    SETTINGS = ("total_steps", "warmup_steps", "milestones", "gamma")

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Iterable[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self.milestones = check_milestones(milestones, self.total_steps, self.warmup_steps)
        self.gamma = check_number("gamma", gamma, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, last_epoch)

    def _closed_form(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        if step < self.warmup_steps:
            return linear_warmup(base_lr, step, self.warmup_steps)
        return multi_step_decay(base_lr, step, self.milestones, self.gamma)
