"""What hooks see of a `Trainer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from booster.booster import Booster
from booster.comm import any_rank
from booster.interface import ModelWrapper, OptimizerWrapper


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
