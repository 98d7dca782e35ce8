"""Arguments of `Trainer.fit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from booster.errors import ConfigError
from booster.logger import get_dist_logger
from booster.validation import check_count, check_path

from .batches import check_loader

AUTO = "auto"


def warn_of_accumulation(saved: int, given: int) -> None:
    """Warn if steps of a run that is resumed are of another number of batches."""
    if saved != given:
        text = f"the run was saved with accumulate={saved}, and continues with accumulate={given}"
        get_dist_logger("booster.trainer").warning(f"{text}: steps have other batches", ranks=[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Arguments of `Trainer.fit`, of the same names."""

    epochs: int | None
    steps: int | None
    eval_loader: Any
    evaluate_every: int | None
    resume: Any

    def check(self, train_loader: Any, dp_size: int, *, has_path: bool) -> None:
        """Check all arguments.

        Args:
            train_loader: Loader of the training.
            dp_size: Number of data-parallel ranks.
            has_path: Whether a `CheckpointHook` has a path to resume from.

        Raises:
            ConfigError: One of them is invalid.
        """
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"fit(epochs={self.epochs}, steps={self.steps}): give the length of the run by one of them"
            )
        check_count(**{"steps": self.steps} if self.epochs is None else {"epochs": self.epochs})
        check_loader(train_loader, "train_loader", dp_size)
        if self.eval_loader is not None:
            check_loader(self.eval_loader, "eval_loader", dp_size)
        if self.evaluate_every is not None:
            check_count(evaluate_every=self.evaluate_every)
            if self.eval_loader is None:
                raise ConfigError(f"evaluate_every={self.evaluate_every} has nothing to evaluate: pass an eval_loader")
        if self.resume is not None:
            check_path("resume", self.resume)
        if self.resume == AUTO and not has_path:
            raise ConfigError("resume='auto' continues from the path of a CheckpointHook, and there is none: add one")

    def fingerprint(self) -> list[str]:
        """Return what must be equal on all ranks."""
        lengths = [f"epochs={self.epochs}", f"steps={self.steps}"]
        return [*lengths, f"evaluates={self.eval_loader is not None}", f"evaluate_every={self.evaluate_every}"]

    def is_reached(self, epoch: int, step: int) -> bool:
        """Return whether the run has its length."""
        return (self.epochs is not None and epoch >= self.epochs) or (self.steps is not None and step >= self.steps)

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation is due after a step."""
        return self.evaluate_every is not None and step % self.evaluate_every == 0

    @property
    def evaluates_epochs(self) -> bool:
        """Whether an evaluation is due after each epoch."""
        return self.eval_loader is not None and self.evaluate_every is None
