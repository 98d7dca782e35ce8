"""A flat stretch and then half a cosine wave down, at once or after a warm-up."""

from __future__ import annotations

from torch.optim import Optimizer

from booster.lr_scheduler.checks import (
    require_floor,
    require_fraction,
    require_number,
    require_total_steps,
    require_warmup_steps,
)
from booster.lr_scheduler.curves import LearningRate, cosine, warm_up
from booster.lr_scheduler.schedule import CurveSchedule

__all__ = ["FlatAnnealingLR", "FlatAnnealingWarmupLR"]


class FlatAnnealingWarmupLR(CurveSchedule):
    """A linear warm-up, a flat stretch, then half a cosine wave to `eta_min` over the steps that are left.

    The warm-up's steps have 1/n, 2/n, ..., n/n of the learning rate.

    Args:
        optimizer: Boosted or not.
        total_steps: Steps of the whole run, warm-up included.
        warmup_steps: Steps of the warm-up.
        pct_start: Part of the steps after the warm-up that are flat, rounded down to whole steps.
        eta_min: The last learning rate.
        last_epoch: -1 begins; n goes on after n + 1 steps with groups that have their `initial_lr`.

    Raises:
        ConfigError: An argument that can't work, or a group whose learning rate would rise.
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
        self.total_steps = require_total_steps(total_steps)
        self.warmup_steps = require_warmup_steps(warmup_steps, self.total_steps)
        self.pct_start = require_fraction("pct_start", pct_start, is_one_allowed=False)
        self.eta_min = require_number("eta_min", eta_min)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, last_epoch)

    def _check_base_lr(self, base_lr: LearningRate, index: int) -> None:
        require_floor("eta_min", self.eta_min, base_lr, index)

    def _curve(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        if step < self.warmup_steps:
            return warm_up(base_lr, step, self.warmup_steps)
        flat_end = self.warmup_steps + int((self.total_steps - self.warmup_steps) * self.pct_start)
        return cosine(base_lr, max(0, step - flat_end), self.total_steps - flat_end, self.eta_min)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """A flat stretch, then half a cosine wave to 0 over the steps that are left.

    Args:
        optimizer: Boosted or not.
        total_steps: Steps of the whole run.
        pct_start: Part of the steps that are flat, rounded down to whole steps.
        last_epoch: -1 begins; n goes on after n + 1 steps with groups that have their `initial_lr`.

    Raises:
        ConfigError: An argument that can't work.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)
