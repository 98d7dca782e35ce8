"""Hook of the learning rate schedule."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from booster.errors import ConfigError

from .hook import Hook, TrainerState
from .metric_hooks import monitored_metric

_UNITS = ("step", "epoch", "evaluation")


class LRScheduleHook(Hook):
    """Steps the Trainer's `lr_scheduler`. A Trainer with a scheduler adds one by steps if it is given none.

    Steps that a loss scaler skips are not counted.

    Args:
        by: "step" of the optimizer, "epoch", or "evaluation" in `fit`.
        monitor: Name in `trainer.metrics` that the scheduler gets, for `ReduceLROnPlateau`; optional.
        priority: Position among the hooks.

    Raises:
        ConfigError: `by` is unknown; in `fit`: there is no scheduler, or it needs a metric.
    """

    def __init__(self, by: str = "step", *, monitor: str | None = None, priority: int = 40) -> None:
        if by not in _UNITS:
            raise ConfigError(f"LRScheduleHook(by={by!r}) is unknown: choose one of {', '.join(map(repr, _UNITS))}")
        if monitor is not None and by == "step":
            raise ConfigError(
                f"LRScheduleHook(by='step', monitor={monitor!r}): metrics are computed by epochs and evaluations: write"
                " by='evaluation'"
            )
        self.priority = priority
        self._unit, self._monitor = by, monitor

    def before_fit(self, trainer: TrainerState) -> None:
        if trainer.lr_scheduler is None:
            raise ConfigError("LRScheduleHook has no scheduler to step: pass lr_scheduler= to the Trainer")
        if isinstance(trainer.lr_scheduler, ReduceLROnPlateau) and self._monitor is None:
            raise ConfigError(
                "ReduceLROnPlateau follows a metric: add LRScheduleHook(by='evaluation', monitor='eval_loss')"
            )
        if self._unit == "evaluation" and not trainer.has_evaluation:
            raise ConfigError(
                "LRScheduleHook(by='evaluation') needs evaluations, and fit() has no eval_loader: pass one"
            )

    def after_iteration(self, trainer: TrainerState) -> None:
        if self._unit == "step" and trainer.is_step_end and not trainer.optimizer.step_was_skipped:
            self._step(trainer)

    def after_epoch(self, trainer: TrainerState) -> None:
        if self._unit == "epoch":
            self._step(trainer)

    def after_evaluation(self, trainer: TrainerState) -> None:
        if self._unit == "evaluation" and trainer.is_fitting:
            self._step(trainer)

    def _step(self, trainer: TrainerState) -> None:
        scheduler: Any = trainer.lr_scheduler
        if self._monitor is None:
            scheduler.step()
        else:
            scheduler.step(monitored_metric(trainer.metrics, self._monitor, "LRScheduleHook"))
