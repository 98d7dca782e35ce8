"""Hook of checkpoints: when a run is saved, and where it resumes from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.tools.inspect import find_contents, training_document
from booster.checkpoint_io.training_state.retention import StepDirectories
from booster.comm import all_gather_text, group_rank
from booster.errors import ConfigError
from booster.validation import check_count, check_flag, check_path, error_of

from .hook import Hook, TrainerState
from .metric_hooks import BestValue

BEST = "best"


class CheckpointHook(Hook):
    """Saves the run into `path/step-...`, as `Booster.save` does, and the best one by a metric into `path/best`.

    Every checkpoint resumes exactly by `fit(resume=)`, also one in the middle of an epoch or of an accumulation.

    Args:
        path: Directory of the run, another one for each hook; `fit(resume="auto")` resumes from there.
        every_epochs: Number of epochs between saves; optional, defaults to 1 if no other interval is given.
        every_steps: Number of steps of the optimizer between saves, optional.
        every_iterations: Number of batches between saves, optional; directories are numbered by batches, then.
        keep_last: Number of checkpoints that are kept, without the best one; optional, defaults to all.
        best: Name in `trainer.metrics`, such as "eval_loss"; after an evaluation that improves it the run is saved as
            the best, over the one before. Optional.
        mode: "min" or "max", which of the values of `best` is the best one.
        use_async: If True, save in the background; errors are raised by the next save, or at the end of `fit`.
        saves_end: If True, save at the end of `fit`, too.
        priority: Position among the hooks; what hooks behind it do at the same point is not in the checkpoint.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        every_epochs: int | None = None,
        every_steps: int | None = None,
        every_iterations: int | None = None,
        keep_last: int | None = None,
        best: str | None = None,
        mode: str = "min",
        use_async: bool = False,
        saves_end: bool = True,
        priority: int = 90,
    ) -> None:
        check_path("path", path)
        intervals = {"every_epochs": every_epochs, "every_steps": every_steps, "every_iterations": every_iterations}
        given = {name: number for name, number in intervals.items() if number is not None}
        check_count(**given, **({} if keep_last is None else {"keep_last": keep_last}))
        if every_steps is not None and every_iterations is not None:
            raise ConfigError(
                f"CheckpointHook(every_steps={every_steps}, every_iterations={every_iterations}) would number its"
                " directories by both: give one of them, or two hooks with different paths"
            )
        check_flag("use_async", use_async)
        check_flag("saves_end", saves_end)
        self.priority = priority
        self.path = Path(path)
        self._every_epochs = every_epochs if given else 1
        self._every_steps, self._every_iterations = every_steps, every_iterations
        self._keep_last, self._use_async, self._saves_end = keep_last, use_async, saves_end
        self._best = None if best is None else BestValue(best, mode, 0.0, "CheckpointHook")
        self._has_improved = False
        self._saved_at: tuple[int, int] | None = None

    @property
    def best(self) -> float | None:
        """Best value of the metric so far; None without one."""
        return None if self._best is None else self._best.value

    def before_fit(self, trainer: TrainerState) -> None:
        if self._best is not None and not trainer.has_evaluation:
            raise ConfigError(
                f"CheckpointHook(best={self._best.monitor!r}) needs evaluations, and fit() has no eval_loader: pass"
                " one, or leave best out"
            )

    def after_evaluation(self, trainer: TrainerState) -> None:
        # Saved with the iteration or the epoch that it belongs to, so that a resumed run does not evaluate once more.
        if self._best is not None and trainer.is_fitting:
            self._has_improved = self._best.update(trainer.metrics) or self._has_improved

    def after_iteration(self, trainer: TrainerState) -> None:
        is_due = self._every_iterations is not None and trainer.iteration % self._every_iterations == 0
        if self._every_steps is not None and trainer.is_step_end:
            is_due = trainer.step % self._every_steps == 0
        self._save_if(trainer, is_due, num_epochs=trainer.epoch)

    def after_epoch(self, trainer: TrainerState) -> None:
        num_epochs = trainer.epoch + 1
        is_due = self._every_epochs is not None and num_epochs % self._every_epochs == 0
        self._save_if(trainer, is_due, num_epochs=num_epochs)

    def after_fit(self, trainer: TrainerState) -> None:
        if self._saves_end and self._saved_at != (trainer.epoch, trainer.iteration):
            self._save(trainer)
        trainer.booster.wait_for_checkpoints()

    def _save_if(self, trainer: TrainerState, is_due: bool, *, num_epochs: int) -> None:
        if self._has_improved:
            self._has_improved = False
            trainer.save(self.path / BEST, use_async=self._use_async)
        if is_due:
            self._save(trainer)
            self._saved_at = num_epochs, trainer.iteration

    def _save(self, trainer: TrainerState) -> None:
        number = trainer.step if self._every_iterations is None else trainer.iteration
        trainer.save(self.path, step=number, keep_last=self._keep_last, use_async=self._use_async)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""
        if self._best is not None:
            self._best.value = state["best"]


def check_paths(hooks: Sequence[CheckpointHook]) -> None:
    """Raise `ConfigError` if two hooks save into one directory."""
    found: dict[str, Path] = {}
    for hook in hooks:
        other = found.setdefault(os.path.realpath(hook.path), hook.path)
        if other is not hook.path:
            raise ConfigError(
                f"two CheckpointHooks save into {str(hook.path)!r}, and would replace and remove each other's"
                f" checkpoints: give each a path of its own, such as {str(hook.path / 'frequent')!r}"
            )


def latest_of(paths: Sequence[Path]) -> Path:
    """Return the directory whose latest checkpoint is the one after most batches; the first if there is none.

    Args:
        paths: Directories of the hooks, at least one.

    Collective: every rank must call it. Rank 0 reads the positions.

    Raises:
        CheckpointError: A checkpoint is damaged.
    """
    if len(paths) == 1:
        return paths[0]
    found: list[str] = []

    def find() -> None:
        if group_rank() == 0:
            positions = [_position_in(path) for path in paths]
            found.append(str(positions.index(max(positions))))

    error = error_of(find)
    return paths[int(all_gather_text("finding the latest checkpoint", found, error=error)[0][0])]


def _position_in(path: Path) -> tuple[int, int]:
    """Return the numbers of batches and epochs of the latest checkpoint in a directory; -1 without one of a Trainer."""
    storage = Storage()
    latest = StepDirectories(storage, path).latest()
    document = None if latest is None else training_document(storage, find_contents(storage, latest.path))
    extra = None if document is None else document.extra
    if not isinstance(extra, Mapping) or "trainer" not in extra:
        return -1, -1
    return extra["trainer"]["iteration"], extra["trainer"]["epoch"]
