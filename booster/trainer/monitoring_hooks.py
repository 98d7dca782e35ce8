"""Hooks that measure a run and log it: `Monitor`, throughput, times, memory, profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from booster.comm import all_gather_numbers, all_reduce_numbers, group_rank, group_size
from booster.device import max_memory_allocated
from booster.errors import ConfigError
from booster.fault_tolerance.progress import observe_phases
from booster.monitor import Monitor
from booster.monitor.step_stats import NON_TRAINING_PHASES, StepStats
from booster.validation import check_path, is_count

from .hook import Hook, TrainerState


class MonitorHook(Hook):
    """Logs the run by a `Monitor`: a record of each step, and the numbers in `trainer.metrics` where they change.

    Args:
        log: As of `Monitor`, as all arguments but the last.
        tensorboard: Directory for TensorBoard.
        wandb: Project of Weights & Biases, or keyword arguments of its `init`.
        mlflow: Experiment of MLflow, or keyword arguments of its `start_run`.
        progress: Progress bar on rank 0: True (if stderr is a terminal), False or "always".
        tokens: Callable that returns the number of tokens of a batch.
        every: Number of steps per record.
        across_ranks: If True, records are of all ranks.
        hang_seconds: Timeout without a finished step, after which all ranks report where they are.
        priority: Position among the hooks.
    """

    def __init__(
        self,
        *,
        log: str | PathLike[str] | None = None,
        tensorboard: str | PathLike[str] | None = None,
        wandb: str | Mapping[str, Any] | None = None,
        mlflow: str | Mapping[str, Any] | None = None,
        progress: bool | Literal["always"] = True,
        tokens: Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None,
        every: int = 1,
        across_ranks: bool = True,
        hang_seconds: float | None = None,
        priority: int = 70,
    ) -> None:
        self.priority = priority
        self._open: Callable[[TrainerState], Monitor] = lambda trainer: Monitor(
            trainer.model,
            trainer.optimizer,
            log=log,
            tensorboard=tensorboard,
            wandb=wandb,
            mlflow=mlflow,
            progress=progress,
            total_steps=trainer.total_steps,
            tokens=tokens,
            every=every,
            first_step=trainer.step + 1 if trainer.step or trainer.is_resumed else None,
            across_ranks=across_ranks,
            hang_seconds=hang_seconds,
        )
        self._monitor: Monitor | None = None
        self._logged: dict[str, float] = {}

    @property
    def record(self) -> dict[str, Any] | None:
        """Last record of a step; None before the first."""
        return None if self._monitor is None else self._monitor.record

    def before_fit(self, trainer: TrainerState) -> None:
        self._monitor = trainer.resources.enter_context(self._open(trainer))
        self._logged = dict(trainer.metrics)

    def after_iteration(self, trainer: TrainerState) -> None:
        self._log_changed(trainer)

    def after_epoch(self, trainer: TrainerState) -> None:
        self._log_changed(trainer)

    def _log_changed(self, trainer: TrainerState) -> None:
        logged = self._logged  # by their text, as nan is not equal to itself
        changed = {name: value for name, value in trainer.metrics.items() if repr(logged.get(name)) != repr(value)}
        if changed and self._monitor is not None:
            self._monitor.log(**changed)
            self._logged |= changed


class _TrainingStats(StepStats):
    """Statistics in which all phases of an evaluation, such as its data, are those of the evaluation."""

    is_evaluating = False

    def on_time(self, name: str | None, seconds: float) -> None:
        super().on_time("evaluate" if self.is_evaluating else name, seconds)


class _EpochStats(Hook):
    """Base of hooks of the statistics of an epoch's steps."""

    def __init__(self, *, priority: int = 20) -> None:
        self.priority = priority
        self._stats: _TrainingStats | None = None

    def before_fit(self, trainer: TrainerState) -> None:
        self._stats = _TrainingStats(trainer.model, trainer.optimizer, None, lambda: None)
        trainer.resources.enter_context(observe_phases(self._stats))

    def before_evaluation(self, trainer: TrainerState) -> None:
        if self._stats is not None:
            self._stats.is_evaluating = True

    def after_evaluation(self, trainer: TrainerState) -> None:
        if self._stats is not None:
            self._stats.is_evaluating = False

    def before_epoch(self, trainer: TrainerState) -> None:
        if self._stats is not None:
            self._stats.clear()

    def after_epoch(self, trainer: TrainerState) -> None:
        assert self._stats is not None, "before_fit comes first"
        trainer.metrics |= self._numbers(self._stats)
        self._stats.clear()

    def _numbers(self, stats: StepStats) -> dict[str, float]:
        raise NotImplementedError


class ThroughputHook(_EpochStats):
    """`epoch_tokens_per_second` or `epoch_samples_per_second` of all ranks, without evaluations and saves.

    Of an epoch that was resumed it is that of the rest. Tokens are counted as by `Monitor`.

    Args:
        priority: Position among the hooks.
    """

    def _numbers(self, stats: StepStats) -> dict[str, float]:
        seconds = _training_seconds(stats.seconds_by_phase())
        num_tokens, seconds = all_reduce_numbers([stats.num_tokens, seconds])
        return {f"epoch_{stats.unit}_per_second": num_tokens / max(seconds / group_size(), 1e-9)}


class TimingHook(_EpochStats):
    """Seconds of an epoch, means over the ranks: `epoch_seconds`, of it `epoch_data_seconds` waited for batches and
    `epoch_evaluate_seconds` in evaluations, and `epoch_step_seconds` for a step of training.

    Args:
        priority: Position among the hooks.
    """

    def _numbers(self, stats: StepStats) -> dict[str, float]:
        parts = stats.seconds_by_phase()
        numbers = {
            "epoch_seconds": sum(parts.values()),
            "epoch_data_seconds": parts["data"],
            "epoch_evaluate_seconds": parts["evaluate"],
            "epoch_step_seconds": _training_seconds(parts) / max(stats.num_steps, 1),
        }
        sums = all_reduce_numbers(list(numbers.values()))
        return {name: total / group_size() for name, total in zip(numbers, sums, strict=True)}


def _training_seconds(parts: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in parts.items() if name not in NON_TRAINING_PHASES)


class MemoryHook(Hook):
    """`epoch_memory_bytes`: the peak memory of the rank that has used most, of its process or accelerator's allocator.

    Args:
        priority: Position among the hooks.

    Attributes:
        by_rank: Peak memory of every rank in bytes.
    """

    def __init__(self, *, priority: int = 20) -> None:
        self.priority = priority
        self.by_rank: list[int] = []

    def after_epoch(self, trainer: TrainerState) -> None:
        self.by_rank = [memory for (memory,) in all_gather_numbers([max_memory_allocated()])]
        trainer.metrics["epoch_memory_bytes"] = float(max(self.by_rank))


class ProfilerHook(Hook):
    """Profiles some iterations by `torch.profiler`, and writes a trace of each rank for Perfetto or chrome://tracing.

    The trace of rank 0 after iteration 5 is `directory/rank-0-iteration-5.json`.

    Args:
        directory: Directory of the traces.
        wait: Iterations without profiling at the start of a cycle.
        warmup: Iterations after these that are profiled and thrown away.
        active: Iterations after these that are in the trace.
        repeat: Number of cycles; 0 for all of the run.
        ranks: Ranks that profile; optional, defaults to all.
        record_shapes: If True, with the shapes of the operators' inputs.
        profile_memory: If True, with allocations.
        with_stack: If True, with Python's stacks.
        priority: Position among the hooks.

    Raises:
        ConfigError: A number is invalid.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        ranks: Sequence[int] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        priority: int = 80,
    ) -> None:
        check_path("directory", directory)
        for name, value, minimum in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("repeat", repeat, 0),
        ):
            if not is_count(value, minimum):
                raise ConfigError(
                    f"ProfilerHook({name}={value!r}) is not a number of iterations: give {minimum} or more"
                )
        if ranks is not None and not isinstance(ranks, Iterable):
            raise ConfigError(f"ProfilerHook(ranks={ranks!r}) is not a list of ranks: write ranks=[{ranks!r}]")
        self.priority = priority
        self._directory, self._ranks = Path(directory), None if ranks is None else frozenset(ranks)
        self._schedule = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: Any = None

    def before_fit(self, trainer: TrainerState) -> None:
        self._profiler = None
        if self._ranks is not None and group_rank() not in self._ranks:
            return
        from torch import profiler  # deferred: it is not needed to import the package

        def write(finished: Any) -> None:
            path = self._directory / f"rank-{group_rank()}-iteration-{trainer.iteration}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(path))

        entered: AbstractContextManager[Any] = profiler.profile(
            activities=profiler.supported_activities(),
            schedule=profiler.schedule(**self._schedule),
            on_trace_ready=write,
            **self._options,
        )
        self._profiler = trainer.resources.enter_context(entered)

    def after_iteration(self, trainer: TrainerState) -> None:
        if self._profiler is not None:
            self._profiler.step()
