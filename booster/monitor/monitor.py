"""`Monitor`: one line around a training loop shows what it does."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from booster.boost_checks import check_boosted_model, check_boosted_optimizer
from booster.comm import ErrorBarrier, count_communication, group_rank, group_size
from booster.device import max_memory_allocated
from booster.errors import BoosterError, ConfigError, DesyncError
from booster.fault_tolerance.progress import Phase, observe_phases
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.validation import check_flag

from .loggers import RESERVED, JsonLines, Log, ProgressBar, TensorBoard, joined_record, numbers_of
from .step_stats import Window
from .watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSettings:
    """See `Monitor`.

    Raises:
        ConfigError: A value that can't be.
    """

    log: str | PathLike[str] | None
    tensorboard: str | PathLike[str] | None
    progress: bool | Literal["always"]
    total_steps: int | None
    every: int
    first_step: int | None
    across_ranks: bool
    hang_seconds: float | None

    def __post_init__(self) -> None:
        _require_path("log", self.log, "the path of a file, such as 'runs/a.jsonl'")
        _require_path("tensorboard", self.tensorboard, "the path of a directory, such as 'runs/a'")
        if self.log is not None and os.path.isdir(self.log):
            raise ConfigError(f"log={self.log!r} is a directory: give the path of a file in it, such as 'a.jsonl'")
        if self.progress not in (True, False, "always"):
            raise ConfigError(
                f"progress={self.progress!r} is unknown: give True for a bar where stderr is a terminal, 'always', or"
                " False"
            )
        check_flag("across_ranks", self.across_ranks)
        _require_count("every", self.every)
        for name in ("total_steps", "first_step"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        seconds: Any = self.hang_seconds
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise ConfigError(
                f"hang_seconds={seconds!r} is no time to wait: give seconds above 0, more than a slow step takes with"
                " evaluation and saving, or leave it out"
            )

    @property
    def shows_progress(self) -> bool:
        """Whether the main process shows a bar."""
        return self.progress == "always" or (self.progress is True and sys.stderr.isatty())

    def facts(self) -> dict[str, Any]:
        """Returns what has to be the same on all ranks."""
        return {
            "every": self.every,
            "across_ranks": bool(self.across_ranks),
            "first_step": self.first_step,
            "hang_seconds": self.hang_seconds,
        }


def _require_path(name: str, value: Any, wanted: str) -> None:
    if value is not None and (not isinstance(value, (str, PathLike)) or not str(value)):
        raise ConfigError(f"{name}={value!r} is no path: give {wanted}, or leave it out")


def _require_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} counts steps, from 1: give a whole number above 0")


_MEETING_SECONDS = 120.0  # that ranks may be apart at the beginning
_PATIENCE_SECONDS = 10.0  # until a rank that waits there says so


class Monitor:
    """Shows and logs what a training loop does, and says who is missing when it hangs. Changes nothing in the loop.

    A step ends with `optimizer.step()`; of several micro-steps the last one's. Its record has the loss that `backward`
    was given (the mean over calls and ranks), the learning rate of each param group, tokens or samples per second over
    all ranks, the seconds of a step and what they were spent with, peak memory by rank, and bytes sent. Times are those
    of the host: an accelerator's work counts where the host waits for it. A batch counts as tokens where the model is
    given `input_ids`, or a first tensor of whole numbers with two dimensions; else as samples. `torch.compile` comes
    before `boost`: the forward of a boosted model that is compiled as a whole is neither counted nor timed apart.

    Args:
        model: The boosted model.
        optimizer: Its boosted optimizer.
        log: A file that gets a line of JSON for each record, for `booster plot`; written by the main process.
        tensorboard: A directory for TensorBoard; needs `pip install torch-booster[tensorboard]`.
        progress: A progress bar on the main process: True where stderr is a terminal, False, or "always".
        total_steps: How many the bar shows.
        tokens: Called with a forward's positional arguments (a tuple) and keyword arguments (a dict); returns how many
            tokens this rank's batch has.
        every: Log every so many steps; a record then is of all of them.
        first_step: Number of the first step, for a run that goes on in its log; None: 1.
        across_ranks: Bring the numbers of all ranks together, by one small all-gather a record; False: records are of
            the main process alone.
        hang_seconds: When no step has ended for so long, every rank prints to stderr its threads' stacks, the phase and
            the communication that it is in, and who is missing there. Nothing is ended. None: no watch.

    Entering the block is collective: every rank must do it, with the same settings.

    Raises:
        ConfigError: Arguments that can't be, a log of another run, or something that is not installed.
        DesyncError: The ranks' settings differ.
        RankFailedError: Only some ranks have entered the block.

    Example:
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
                "Monitor() was given an optimizer of another model: give the two that one call of boost() returned"
            )
        if tokens is not None and not callable(tokens):
            raise ConfigError(
                f"tokens={tokens!r} can't be called: give a function of (arguments, keywords) that returns a number,"
                " such as lambda arguments, keywords: arguments[0].numel()"
            )
        self._settings = MonitorSettings(
            log=log,
            tensorboard=tensorboard,
            progress=progress,
            total_steps=total_steps,
            every=every,
            first_step=first_step,
            across_ranks=across_ranks,
            hang_seconds=hang_seconds,
        )
        self._window = Window(self._model, self._optimizer, tokens, self._end_step)
        self._step = (first_step or 1) - 1
        self._record: dict[str, Any] | None = None
        self._open: ExitStack | None = None
        self._logs: list[Log] = []
        self._watchdog: Watchdog | None = None

    @property
    def record(self) -> dict[str, Any] | None:
        """The last record, the same on all ranks but for `lr`; None before the first."""
        return self._record

    def log(self, **numbers: Any) -> None:
        """Adds numbers to the logs, for the last step that has ended. Written by the main process, others' are ignored.

        Args:
            **numbers: By name; `booster.gather_for_metrics` makes numbers of all ranks out of each one's.

        Raises:
            ConfigError: Something that is no number, a name that the records have already, or outside of the block.
        """
        values = {name: _number(name, value) for name, value in numbers.items()}
        if self._open is None:
            raise ConfigError(
                f"log({', '.join(numbers)}) was called outside of the Monitor's block, and its logs are closed: write"
                " `with Monitor(model, optimizer) as monitor:` around it"
            )
        if values:
            self._write({"step": self._step, "time": round(time.time(), 3), **values})

    # The block.

    def __enter__(self) -> Monitor:
        if self._open is not None:
            raise ConfigError("this Monitor's block was entered already: make another Monitor for another block")
        with ExitStack() as opened:
            self._meet(opened)
            self._count = opened.enter_context(count_communication())
            self._sent_bytes = 0
            if self._settings.hang_seconds is not None:
                self._watchdog = Watchdog(self._settings.hang_seconds, lambda: self._step)
                self._watchdog.start()
                opened.callback(self._watchdog.stop)
            self._window.clear()
            opened.enter_context(observe_phases(self._window))
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened, self._open, self._watchdog = self._open, None, None
        if opened is not None:
            opened.close()
        self._logs = []

    def _meet(self, opened: ExitStack) -> None:
        """Opens the logs, and agrees with the other ranks; what fails on one fails on all."""
        barrier = ErrorBarrier(name="monitor", timeout_seconds=_MEETING_SECONDS)
        error: Exception | None = None
        try:
            if group_rank() == 0:
                self._open_logs(opened)
        except BoosterError as failure:  # raised on all ranks by the barrier
            error = failure
        facts = self._settings.facts()
        with _reported_if_long():
            everyone = barrier.gather("entering Monitor's block", json.dumps(facts).encode(), error)
        others = [(rank, json.loads(theirs)) for rank, theirs in enumerate(everyone)]
        differing = next(((rank, theirs) for rank, theirs in others if theirs != facts), None)
        if differing is not None:
            rank, theirs = differing
            name = next(one for one in facts if facts[one] != theirs[one])
            error = DesyncError(
                f"Monitor({name}={facts[name]!r}) on rank 0 and {name}={theirs[name]!r} on rank {rank}: some ranks"
                " would wait in vain for the others' numbers; give the same on all ranks"
            )
        barrier.share("comparing Monitor's settings", error=error)

    def _open_logs(self, opened: ExitStack) -> None:
        settings, first_step = self._settings, self._settings.first_step
        made: list[Callable[[], Log]] = []
        if settings.log is not None:
            path = Path(settings.log)
            made.append(lambda: JsonLines(path, first_step))
        if settings.tensorboard is not None:
            directory = Path(settings.tensorboard)
            made.append(lambda: TensorBoard(directory))
        if settings.shows_progress:
            made.append(lambda: ProgressBar(settings.total_steps, first_step or 1))
        for make in made:
            log = make()
            opened.callback(log.close)
            self._logs.append(log)

    # Steps.

    def _end_step(self) -> None:
        self._step += 1
        if self._watchdog is not None:
            self._watchdog.step_ended()
        if self._step % self._settings.every:
            return
        with Phase("monitor"):
            sent_bytes = sum(self._count.sent.values())
            mine = numbers_of(
                self._window, step=self._step, memory=max_memory_allocated(), sent_bytes=sent_bytes - self._sent_bytes
            )
            self._window.clear()
            self._record = joined_record(
                mine,
                lr=[float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group],
                unit=self._window.unit,
                across_ranks=self._settings.across_ranks and group_size() > 1,
            )
            self._sent_bytes = sum(self._count.sent.values())  # without those of the record itself
            self._write(self._record)

    def _write(self, record: dict[str, Any]) -> None:
        for log in self._logs:
            log.write(record)


def _number(name: str, value: Any) -> float:
    if name in RESERVED:
        raise ConfigError(f"log({name}=...) would hide what each record says of itself: choose another name")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"log({name}=...) was given a {type(value).__name__} that is no number ({error}): give a number, or a"
            " tensor with one element"
        ) from error


@contextmanager
def _reported_if_long() -> Iterator[None]:
    """Says on this rank what it waits for, if that takes long: elsewhere the cause may look like another one."""
    text = (
        f"rank {group_rank()} has waited {_PATIENCE_SECONDS:g} s at the beginning of Monitor's block for other ranks:"
        " every rank has to enter it, not the main process alone"
    )
    timer = threading.Timer(_PATIENCE_SECONDS, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
