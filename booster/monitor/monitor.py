"""`Monitor`: metrics, logs and hang detection of a training loop."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from booster.boost_checks import check_boosted_model, check_boosted_optimizer
from booster.comm import ErrorBarrier, count_communication, group_rank, group_size
from booster.device import max_memory_allocated
from booster.errors import ConfigError, DesyncError
from booster.fault_tolerance.progress import Phase, observe_phases
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.validation import check_flag, is_count, is_non_nan_number

from .expert_load import ExpertLoad, sort_layers
from .loggers import (
    RESERVED_NAMES,
    JsonLinesLogger,
    ProgressBar,
    RecordLogger,
    TensorBoardLogger,
    aggregate_record,
    stats_to_vector,
)
from .step_stats import StepStats
from .trackers import MLflowLogger, WandbLogger, check_settings
from .watchdog import Watchdog

_ENTRY_TIMEOUT_SECONDS = 120.0  # timeout of the barrier on entry
_HINT_SECONDS = 10.0  # wait there after which a rank prints a hint


class Monitor:
    """Metrics of a training loop on screen and in logs, with hang detection. Does not change the loop.

    A step ends with `optimizer.step()`; with gradient accumulation, with the call that updates. Its record has the loss
    passed to `backward` (mean over calls and ranks), the learning rate of each parameter group, tokens or samples per
    second over all ranks, the seconds per step and their breakdown, peak memory by rank, and bytes sent. Times are
    measured on the host: work of an accelerator counts where the host waits for it. The unit is tokens if the model
    receives `input_ids` or if its first tensor is a 2-d integer tensor, else samples. Call `torch.compile` before
    `boost`: if a boosted model is compiled itself, its forward is neither counted nor timed separately.

    A model with experts has `experts` in its records: by name of the module of experts the `tokens` that each expert
    computes in the record's steps, the number of `dropped` ones, and `entropy`, the mean entropy of the router's
    probabilities in nats, or None if its logits are unknown.

    Args:
        model: Boosted model.
        optimizer: Boosted optimizer of the model.
        log: JSON lines file with one line per record, for `booster plot`; written by rank 0.
        tensorboard: Directory for TensorBoard; needs `pip install torch-booster[tensorboard]`.
        wandb: Project of Weights & Biases, or keyword arguments of `wandb.init`; needs the extra "wandb".
        mlflow: Experiment of MLflow, or keyword arguments of `mlflow.start_run`; needs the extra "mlflow".
        progress: Progress bar on rank 0: True (if stderr is a terminal), False or "always".
        total_steps: Number of steps for the bar.
        tokens: Callable with the positional arguments (a tuple) and keyword arguments (a dict) of a forward; returns
            the number of tokens in this rank's batch.
        every: Number of steps per record.
        first_step: Number of the first step, for a run that resumes its log; optional, defaults to 1.
        across_ranks: If True, aggregate over all ranks with one small all-gather per record, and with experts one
            all-reduce. If False, records describe rank 0 only.
        hang_seconds: Timeout without a finished step, after which every rank prints to stderr its thread stacks, its
            phase and collective, and the missing ranks. The run is not aborted. Optional, defaults to no hang
            detection.

    Raises:
        ConfigError: Arguments are invalid, the log holds another run, or a dependency is not installed.
        DesyncError: The ranks' settings differ.
        RankFailedError: Only some ranks entered the block.

    Collective: entering the block, with the same settings on every rank.

    Examples:
        >>> import torch
        >>> from booster import Booster
        >>> from booster.monitor import Monitor
        >>> model = torch.nn.Linear(3, 1)
        >>> booster = Booster(device="cpu")
        >>> model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with Monitor(model, optimizer) as monitor:
        ...     booster.backward(model(torch.ones(2, 3)).square().mean(), optimizer)
        ...     optimizer.step()
        >>> monitor.record["step"]
        1
    """

    def __init__(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper,
        *,
        log: str | PathLike[str] | None = None,
        tensorboard: str | PathLike[str] | None = None,
        wandb: str | Mapping[str, Any] | None = None,
        mlflow: str | Mapping[str, Any] | None = None,
        progress: bool | Literal["always"] = True,
        total_steps: int | None = None,
        tokens: Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None,
        every: int = 1,
        first_step: int | None = None,
        across_ranks: bool = True,
        hang_seconds: float | None = None,
    ) -> None:
        self._model = check_boosted_model(model, "Monitor")
        self._optimizer = check_boosted_optimizer(optimizer, "Monitor")
        if self._optimizer.model is not self._model:
            raise ConfigError(
                "Monitor() got an optimizer of another model: pass the model and optimizer returned by one boost() call"
            )
        if tokens is not None and not callable(tokens):
            raise ConfigError(
                f"tokens={tokens!r} is not callable: pass a function of (arguments, keywords) that returns a number,"
                " such as lambda arguments, keywords: arguments[0].numel()"
            )
        _check_path("log", log, "the path of a file, such as 'runs/a.jsonl'")
        _check_path("tensorboard", tensorboard, "the path of a directory, such as 'runs/a'")
        for name, settings in (("wandb", wandb), ("mlflow", mlflow)):
            if settings is not None:
                check_settings(name, settings)
        if log is not None and os.path.isdir(log):
            raise ConfigError(f"log={log!r} is a directory: pass the path of a file in it, such as 'a.jsonl'")
        if progress not in (True, False, "always"):
            raise ConfigError(
                f"progress={progress!r} is unknown: pass True (a bar if stderr is a terminal), 'always' or False"
            )
        check_flag("across_ranks", across_ranks)
        for name, count in (("every", every), ("total_steps", total_steps), ("first_step", first_step)):
            if not is_count(count) and (name == "every" or count is not None):
                raise ConfigError(f"{name}={count!r} is not a number of steps: pass a positive int")
        _check_hang_seconds(hang_seconds)
        self._destinations = log, tensorboard, wandb, mlflow
        self._progress, self._total_steps = progress, total_steps
        self._every, self._first_step, self._across_ranks = every, first_step, across_ranks
        self._hang_seconds = hang_seconds
        self._stats = StepStats(self._model, self._optimizer, tokens, self._end_step)
        self._step = (first_step or 1) - 1
        self._record: dict[str, Any] | None = None
        self._resources: ExitStack | None = None
        self._experts: ExpertLoad | None = None
        self._logs: list[RecordLogger] = []
        self._watchdog: Watchdog | None = None

    @property
    def record(self) -> dict[str, Any] | None:
        """Last record, equal on all ranks except for `lr`; None before the first."""
        return self._record

    @property
    def _is_across_ranks(self) -> bool:
        return self._across_ranks and group_size() > 1

    def log(self, **numbers: Any) -> None:
        """Log values for the last finished step. Rank 0 writes its values, those of other ranks are ignored.

        Args:
            **numbers: Values by name; use `booster.gather_for_metrics` to aggregate over ranks first.

        Raises:
            ConfigError: A value is not a number, a name is reserved, or the call is outside of the block.
        """
        values = {name: _number(name, value) for name, value in numbers.items()}
        if self._resources is None:
            raise ConfigError(
                f"log({', '.join(numbers)}) was called outside of the Monitor's block, where its logs are closed: call"
                " it inside `with Monitor(model, optimizer) as monitor:`"
            )
        if values:
            self._write({"step": self._step, "time": round(time.time(), 3), **values})

    def __enter__(self) -> Monitor:
        if self._resources is not None:
            raise ConfigError("this Monitor's block is already entered: create another Monitor for another block")
        with ExitStack() as opened:
            experts = ExpertLoad(self._model)
            opened.enter_context(experts.observe())
            experts.num_experts = self._open_synchronized(opened, experts.num_experts)
            self._experts = experts if experts.num_experts else None
            self._count = opened.enter_context(count_communication())
            self._sent_bytes = 0
            if self._hang_seconds is not None:
                self._watchdog = Watchdog(self._hang_seconds, lambda: self._step)
                self._watchdog.start()
                opened.callback(self._watchdog.stop)
            self._stats.clear()
            opened.enter_context(observe_phases(self._stats))
            self._resources = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened, self._resources, self._watchdog = self._resources, None, None
        if opened is not None:
            opened.close()
        self._logs = []

    def _open_synchronized(self, opened: ExitStack, num_experts: dict[str, int]) -> dict[str, int]:
        """Open the logs, compare the ranks' settings, and return the experts by layer of all ranks. Collective."""
        barrier = ErrorBarrier(name="monitor", timeout_seconds=_ENTRY_TIMEOUT_SECONDS)
        error: Exception | None = None
        try:
            if group_rank() == 0:
                self._open_logs(opened)
        except Exception as failure:  # raised on all ranks by the barrier, also those of Weights & Biases
            error = failure
        names = ("every", "across_ranks", "first_step", "hang_seconds")
        fingerprint = {name: getattr(self, f"_{name}") for name in names}
        with _hint_if_slow():
            local = json.dumps([fingerprint, num_experts]).encode()
            gathered = [json.loads(one) for one in barrier.gather("entering Monitor's block", local, error)]
        others = [(rank, other) for rank, (other, _) in enumerate(gathered)]
        differing = next(((rank, other) for rank, other in others if other != fingerprint), None)
        if differing is not None:
            rank, other = differing
            name = next(one for one in fingerprint if fingerprint[one] != other[one])
            error = DesyncError(
                f"Monitor({name}={fingerprint[name]!r}) on rank 0 and {name}={other[name]!r} on rank {rank}: the"
                " all-gather of the records would hang; pass the same value on all ranks"
            )
        layers = sort_layers({name: number for _, found in gathered for name, number in found.items()})
        shared = barrier.share("comparing Monitor's settings", json.dumps(layers).encode(), error)
        return json.loads(shared)  # type: ignore[no-any-return]

    def _open_logs(self, opened: ExitStack) -> None:
        def add(opened_log: RecordLogger) -> None:
            opened.callback(opened_log.close)
            self._logs.append(opened_log)

        log, tensorboard, wandb, mlflow = self._destinations
        if log is not None:
            add(JsonLinesLogger(Path(log), self._first_step))
        if tensorboard is not None:
            add(TensorBoardLogger(Path(tensorboard)))
        if wandb is not None:
            add(WandbLogger(wandb))
        if mlflow is not None:
            add(MLflowLogger(mlflow))
        if self._progress == "always" or (self._progress is True and sys.stderr.isatty()):
            add(ProgressBar(self._total_steps, self._first_step or 1))

    def _end_step(self) -> None:
        self._step += 1
        if self._watchdog is not None:
            self._watchdog.on_step_end()
        if self._step % self._every:
            return
        with Phase("monitor"):
            sent_bytes = sum(self._count.sent.values())
            mine = stats_to_vector(
                self._stats, step=self._step, memory=max_memory_allocated(), sent_bytes=sent_bytes - self._sent_bytes
            )
            self._stats.clear()
            self._record = aggregate_record(
                mine,
                lr=[float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group],
                unit=self._stats.unit,
                across_ranks=self._is_across_ranks,
            )
            if self._experts is not None:
                self._record["experts"] = self._experts.record(across_ranks=self._is_across_ranks)
                self._experts.clear()
            self._sent_bytes = sum(self._count.sent.values())  # excludes the collectives of the record
            self._write(self._record)

    def _write(self, record: dict[str, Any]) -> None:
        for log in self._logs:
            log.write(record)


def _check_path(name: str, value: Any, expected: str) -> None:
    if value is not None and (not isinstance(value, (str, PathLike)) or not str(value)):
        raise ConfigError(f"{name}={value!r} is not a path: pass {expected}, or leave it out")


def _check_hang_seconds(seconds: Any) -> None:
    if seconds is not None and not (is_non_nan_number(seconds) and 0 < seconds < math.inf):
        raise ConfigError(
            f"hang_seconds={seconds!r} is not a positive number of seconds: pass more than a slow step takes with"
            " evaluation and saving, or leave it out"
        )


def _number(name: str, value: Any) -> float:
    if name in RESERVED_NAMES:
        raise ConfigError(f"log({name}=...) would hide a field of the records: choose another name")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"log({name}=...) got a {type(value).__name__} that is not a number ({error}): pass a number or a"
            " one-element tensor"
        ) from error


@contextmanager
def _hint_if_slow() -> Iterator[None]:
    """Print a hint on this rank if the block takes long: other ranks may fail with an unrelated error first."""
    text = (
        f"rank {group_rank()} has waited {_HINT_SECONDS:g} s on entry of Monitor's block for other ranks:"
        " every rank must enter it, not rank 0 alone"
    )
    timer = threading.Timer(_HINT_SECONDS, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
