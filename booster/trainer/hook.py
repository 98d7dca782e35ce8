"""Hooks of a `Trainer`: what they see of it, their points, their order, and what happens if one of them raises."""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from booster.booster import Booster
from booster.comm import abort_all_groups, any_rank, check_same_across_ranks, group_size, report_failure
from booster.errors import ConfigError, RankFailedError, add_note
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.logger import get_dist_logger
from booster.validation import error_of, is_int


class TrainerState(ABC):
    """Objects and progress of a run, which hooks read.

    Attributes:
        booster: The Booster.
        model: Boosted model.
        optimizer: Boosted optimizer.
        lr_scheduler: Scheduler of the optimizer, or None.
        epoch: Number of finished epochs.
        iteration: Number of batches of this rank since the start of the run.
        epoch_iteration: Number of batches of the current epoch.
        step: Number of steps of the optimizer, also skipped ones.
        total_steps: Number of steps at which `fit` ends; None if it counts epochs.
        is_step_end: Whether the optimizer has stepped in this iteration: the last of an accumulation.
        is_fitting: Whether `fit` is running.
        is_resumed: Whether `fit` was asked to resume.
        has_evaluation: Whether `fit` has an `eval_loader`.
        batch: Current batch: a mapping, or a `LabeledBatch` with `inputs` and `targets`.
        loss: Detached loss of this rank's batch; None on pipeline stages that do not have it.
        outputs: Outputs of the batch, if a hook has them in `needs_outputs`; None on pipeline stages but the last.
        grad_norm: Gradient norm of the last step before clipping; None without `max_norm`.
        metrics: Numbers that hooks have computed, by name, equal on all ranks.
        resources: Contexts that hooks enter in `before_fit`; left when `fit` ends or raises.
    """

    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    lr_scheduler: LRScheduler | None
    resources: ExitStack

    def __init__(self) -> None:
        self.epoch = self.iteration = self.epoch_iteration = self.step = 0
        self.total_steps: int | None = None
        self.is_step_end = False
        self.is_fitting = False
        self.is_resumed = False
        self.has_evaluation = False
        self.batch: Any = None
        self.loss: torch.Tensor | None = None
        self.outputs: Any = None
        self.grad_norm: torch.Tensor | None = None
        self.metrics: dict[str, float] = {}
        self._is_stopped = False

    def stop(self, condition: bool = True) -> None:
        """End `fit` on all ranks after this iteration if the condition holds on any of them.

        Args:
            condition: Whether to stop, on this rank.

        Collective: every rank must call it.
        """
        self._is_stopped = any_rank([bool(condition)])[0] or self._is_stopped

    @abstractmethod
    def save(
        self,
        path: str | PathLike[str],
        *,
        step: int | None = None,
        keep_last: int | None = None,
        use_async: bool = False,
    ) -> None:
        """Save the run for an exact resume."""


# Note [Failing hooks]
# An error of a hook's `before_fit`, which is where hooks check their settings, is raised on all ranks. At all other
# points a comparison over the ranks would cost a message per hook and iteration, and other ranks may already wait for
# this one inside of the same hook. There the rank reports the error, which names the hook, and aborts its groups: the
# others stop at their next collective with a `RankFailedError` that has the report.

POINTS = (
    *("before_fit", "after_fit", "before_epoch", "after_epoch", "before_iteration", "after_iteration"),
    *("before_evaluation", "after_evaluation_iteration", "after_evaluation"),
)
DEFAULT_PRIORITY = 50


class Hook:
    """Base of hooks, with methods for all points, which do nothing. A hook need not derive from it.

    A hook is any object with some of these methods. Hooks are called in the order of their priorities, smaller ones
    first. One with `state_dict()` and `load_state_dict(state)` is part of checkpoints: `state_dict` is called on all
    ranks, rank 0's result is written, and every rank gets it. It has plain values and tensors.

    Attributes:
        priority: Position in the order; optional, defaults to 50. Those of the hooks of the library are in the
            documentation; `CheckpointHook` has 90, so that a checkpoint has what smaller ones did.
        needs_outputs: "training" and "evaluation" if the hook reads `trainer.outputs` there; optional.
    """

    priority: int = DEFAULT_PRIORITY
    needs_outputs: ClassVar[tuple[str, ...]] = ()

    def before_fit(self, trainer: TrainerState) -> None:
        """Called at the start of `fit`, after a checkpoint was loaded. An error is raised on all ranks."""

    def after_fit(self, trainer: TrainerState) -> None:
        """Called at the end of `fit`, also of one that was stopped."""

    def before_epoch(self, trainer: TrainerState) -> None:
        """Called before the first batch of an epoch; not where a run resumes in the middle of one."""

    def after_epoch(self, trainer: TrainerState) -> None:
        """Called after the last batch of an epoch and its evaluation."""

    def before_iteration(self, trainer: TrainerState) -> None:
        """Called with `trainer.batch`, before the forward of a batch."""

    def after_iteration(self, trainer: TrainerState) -> None:
        """Called after backward and, if `trainer.is_step_end`, the step, with `trainer.loss`."""

    def before_evaluation(self, trainer: TrainerState) -> None:
        """Called before an evaluation, in `fit` or by `evaluate`."""

    def after_evaluation_iteration(self, trainer: TrainerState) -> None:
        """Called after the forward of a batch of an evaluation, with `trainer.loss` and `trainer.outputs`."""

    def after_evaluation(self, trainer: TrainerState) -> None:
        """Called after an evaluation."""


def hook_name(hook: object) -> str:
    """Return the name of a hook in messages and checkpoints."""
    return type(hook).__name__


def priority_of(hook: object) -> int:
    return int(getattr(hook, "priority", DEFAULT_PRIORITY))


def check_hook(hook: object) -> None:
    """Raise `ConfigError` unless an object is a hook: with points, no misspelt ones, a priority, and no class."""
    if isinstance(hook, type):
        raise ConfigError(
            f"the hook {hook.__name__} is a class, and the Trainer calls objects: write {hook.__name__}()"
        )
    methods = [name for name in dir(hook) if name.startswith(("before_", "after_")) and callable(getattr(hook, name))]
    unknown = [name for name in methods if name not in POINTS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], POINTS, n=1) or ["one of them"]
        raise ConfigError(
            f"the hook {hook_name(hook)} has the method {unknown[0]}, which would never be called: the points are"
            f" {', '.join(POINTS)}. Name it {near[0]}, or without before_ and after_"
        )
    if not methods:
        raise ConfigError(
            f"hooks has an entry of class {hook_name(hook)} with none of the methods {', '.join(POINTS)}:"
            " pass objects with those that they need"
        )
    for name in methods:
        try:
            inspect.signature(getattr(hook, name)).bind(None)
        except TypeError as error:
            raise ConfigError(
                f"{hook_name(hook)}.{name} can't be called with the Trainer as its argument ({error}): write"
                f" def {name}(self, trainer)"
            ) from error
    priority = getattr(hook, "priority", DEFAULT_PRIORITY)
    if not is_int(priority):
        raise ConfigError(
            f"the hook {hook_name(hook)} has priority={priority!r}, which is not an int: smaller ones are called first,"
            f" and {DEFAULT_PRIORITY} is the default"
        )


class HookList:
    """The hooks of a Trainer, in the order of their priorities.

    Args:
        hooks: Checked hooks; those of equal priority stay in this order.
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        self.hooks: tuple[Any, ...] = tuple(sorted(hooks, key=priority_of))
        self._of_point = {point: [one for one in self.hooks if _implements(one, point)] for point in POINTS}

    def fingerprint(self) -> list[str]:
        """Return what must be equal on all ranks."""
        return [f"hook {hook_name(one)} of priority {priority_of(one)}" for one in self.hooks]

    def needs_outputs(self, mode: str) -> bool:
        """Return whether a hook reads the outputs in "training" or "evaluation"."""
        return any(mode in getattr(one, "needs_outputs", ()) for one in self.hooks)

    def call(self, point: str, trainer: TrainerState) -> None:
        """Call the hooks at a point; see Note [Failing hooks]."""
        for hook in self._of_point[point]:
            method, where = getattr(hook, point), f"{hook_name(hook)}.{point}"
            if point == "before_fit":
                error = error_of(lambda method=method: method(trainer))  # type: ignore[misc]
                if error is not None:
                    add_note(error, f"It was raised in the hook {where}.")
                check_same_across_ranks(f"Trainer.fit(), the hook {where}", [], error=error)
            else:
                with ends_all_ranks(f"the hook {where}"):
                    method(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the hooks by their names. Collective where a hook's is."""
        return {name: hook.state_dict() for name, hook in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of the hooks that were stored; others start anew."""
        stateful = self._stateful()
        for name, hook in stateful.items():
            if name in state:
                hook.load_state_dict(state[name])
        unused, new = sorted(set(state) - set(stateful)), sorted(set(stateful) - set(state))
        logger = get_dist_logger("booster.trainer")
        if unused:
            text = "the checkpoint has states of hooks that this Trainer lacks, which are ignored"
            logger.warning(f"{text}: {', '.join(unused)}", ranks=[0])
        if new:
            text = "the checkpoint has no states of hooks of this Trainer, which start anew"
            logger.warning(f"{text}: {', '.join(new)}", ranks=[0])

    def _stateful(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for hook in self.hooks:
            if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
                name, number = hook_name(hook), 1
                while name in found:  # several of one class
                    number += 1
                    name = f"{hook_name(hook)} {number}"
                found[name] = hook
        return found


def _implements(hook: object, point: str) -> bool:
    method = getattr(hook, point, None)
    return callable(method) and getattr(type(hook), point, None) is not getattr(Hook, point)


@contextmanager
def ends_all_ranks(where: str) -> Iterator[None]:
    """Context of a user's code on this rank, whose errors end all ranks; see Note [Failing hooks].

    Args:
        where: Name of the code in the messages.
    """
    try:
        yield
    except Exception as error:
        add_note(error, f"It was raised in {where}.")
        if group_size() > 1:
            if not isinstance(error, RankFailedError):
                report_failure(f"{where}: {type(error).__name__}: {error}")
            abort_all_groups(f"{where}: {error}")
        raise
