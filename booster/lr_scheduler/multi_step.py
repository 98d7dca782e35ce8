"""A smaller learning rate from each milestone on, at once or after a warm-up."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer, lr_scheduler

from booster.lr_scheduler.checks import (
    require_milestones,
    require_number,
    require_total_steps,
    require_warmup_steps,
)
from booster.lr_scheduler.curves import LearningRate, multi_step, warm_up
from booster.lr_scheduler.schedule import CurveSchedule, Schedule

__all__ = ["MultiStepLR", "MultiStepWarmupLR"]


class MultiStepLR(Schedule, lr_scheduler.MultiStepLR):
    """The learning rate multiplied by `gamma` from each milestone on; torch's.

    Args:
        optimizer: Boosted or not.
        total_steps: Steps of the whole run.
        milestones: The steps, in order; a step that is named twice counts twice. At least one.
        gamma: The factor.
        last_epoch: -1 begins; n goes on after n + 1 steps with groups that have their `initial_lr`.

    Raises:
        ConfigError: An argument that can't work, or a milestone that no step reaches.
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
        self.total_steps = require_total_steps(total_steps)
        steps = require_milestones(milestones, self.total_steps)
        self.gamma = require_number("gamma", gamma, is_least_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, steps, self.gamma, last_epoch)

    def _curve(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        return multi_step(base_lr, step, sorted(self.milestones.elements()), self.gamma)


class MultiStepWarmupLR(CurveSchedule):
    """A linear warm-up to the learning rate, which is then multiplied by `gamma` from each milestone on.

    The warm-up's steps have 1/n, 2/n, ..., n/n of the learning rate.

    Args:
        optimizer: Boosted or not.
        total_steps: Steps of the whole run, warm-up included.
        warmup_steps: Steps of the warm-up.
        milestones: The steps, in order, counted from the beginning of the run; a step that is named twice counts
            twice. At least one, none in the warm-up.
        gamma: The factor.
        last_epoch: -1 begins; n goes on after n + 1 steps with groups that have their `initial_lr`.

    Raises:
        ConfigError: An argument that can't work, or a milestone that could not be kept.
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
        self.total_steps = require_total_steps(total_steps)
        self.warmup_steps = require_warmup_steps(warmup_steps, self.total_steps)
        self.milestones = require_milestones(milestones, self.total_steps, self.warmup_steps)
        self.gamma = require_number("gamma", gamma, is_least_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, last_epoch)

    def _curve(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        if step < self.warmup_steps:
            return warm_up(base_lr, step, self.warmup_steps)
        return multi_step(base_lr, step, self.milestones, self.gamma)
