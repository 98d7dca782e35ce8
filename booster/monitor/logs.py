"""Where records go: a file of JSON lines, TensorBoard, and a progress bar."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from booster.errors import ConfigError
from booster.logger import get_dist_logger
from booster.monitor.records import to_line

__all__ = ["JsonLines", "Log", "ProgressBar", "TensorBoard", "last_step_in"]

_TAIL_BYTES = 2**20  # more than any record


class Log(Protocol):
    """Takes the records, on one rank alone."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Takes the record of a step, or what the user adds to one."""

    def close(self) -> None:
        """Ends it; nothing is written afterwards."""


class JsonLines:
    """A file to which each record is added as a whole line, so that whoever reads meanwhile sees no part of one.

    Args:
        path: Folders that are missing are made.
        first_step: Of the run that goes on; None: a run begins, and the file must not hold another one.

    Raises:
        ConfigError: It holds another run, or can't be written.
    """

    def __init__(self, path: Path, first_step: int | None) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            last = last_step_in(path)
            if last is not None and first_step is None:
                raise ConfigError(
                    f"log={str(path)!r} holds steps up to {last} of a run already, and the lines of two would be mixed:"
                    f" give another path, remove the file, or go on with that run by first_step={last + 1}"
                )
            size = path.stat().st_size if path.is_file() else 0
            self._file = io.FileIO(path, "a+" if size else "a")
            if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
                self._file.write(b"\n")  # the run before ended in the middle of a line
        except OSError as error:
            raise ConfigError(
                f"log={str(path)!r} can't be written ({error}): give the path of a file, in a directory that may be"
                " written to"
            ) from error
        self._has_failed = False

    def write(self, record: Mapping[str, Any]) -> None:
        line = to_line(record).encode()
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes")
        except OSError as error:  # a full disk is no reason to end a training
            if not self._has_failed:
                get_dist_logger().warning(f"a line of {self._path} could not be written, the training goes on: {error}")
            self._has_failed = True

    def close(self) -> None:
        self._file.close()


def last_step_in(path: Path) -> int | None:
    """Returns the step of the last whole record of a file of JSON lines; None where there is none."""
    from booster.monitor.runs import record_of  # which knows what a line holds

    if not path.is_file():  # also a device such as /dev/null, which may be read for ever
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    records = (record_of(line) for line in reversed(lines))
    return next((int(record["step"]) for record in records if record is not None), None)


class TensorBoard:
    """Event files that TensorBoard shows.

    Args:
        directory: Where they are put.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard={str(directory)!r} needs TensorBoard, which is not installed ({error}): run"
                " `pip install torch-booster[tensorboard]`, or leave tensorboard out"
            ) from error
        try:
            self._writer = SummaryWriter(str(directory))
        except OSError as error:
            raise ConfigError(
                f"tensorboard={str(directory)!r} can't be written ({error}): give a directory that may be written to"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name in ("step", "time", "steps", "ranks"):
                continue
            for tag, number in _scalars(name, value):
                self._writer.add_scalar(tag, number, record["step"], walltime=record["time"])

    def close(self) -> None:
        self._writer.close()


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [(f"{name}/{key}", one) for key, one in value.items()]
    if isinstance(value, list):
        return [(name if len(value) == 1 else f"{name}/{index}", one) for index, one in enumerate(value)]
    return [] if value is None else [(name, value)]


class ProgressBar:
    """A line at the bottom of a terminal.

    Args:
        total_steps: None: it is not known how many there will be.
        first_step: The number of the first step that comes.
    """

    def __init__(self, total_steps: int | None, first_step: int) -> None:
        self._bar = tqdm(
            total=total_steps, initial=first_step - 1, unit="step", file=sys.stderr, dynamic_ncols=True, leave=True
        )
        self._added = ""
        self._text = ""

    def write(self, record: Mapping[str, Any]) -> None:
        if "seconds" in record:
            self._text = _progress_text(record)
            self._bar.update(record["step"] - self._bar.n)
        else:
            self._added = "".join(
                f" {name} {value:.4g}" for name, value in record.items() if name not in ("step", "time")
            )
        self._bar.set_postfix_str(self._text + self._added, refresh="seconds" not in record)

    def close(self) -> None:
        self._bar.close()


def _progress_text(record: Mapping[str, Any]) -> str:
    loss = "no loss" if record["loss"] is None else f"loss {record['loss']:.4f}"
    unit = "tokens" if "tokens_per_second" in record else "samples"
    seconds, parts = record["seconds"], record["seconds_in"]
    shown = ("forward", "backward", "step", "data", "communication")
    split = ", ".join(f"{name} {parts[name] / max(seconds, 1e-9):.0%}" for name in shown)
    rate = f" lr {record['lr'][0]:.3g}" if record["lr"] else ""
    speed = f"{record[f'{unit}_per_second']:.4g} {unit}/s {seconds * 1e3:.4g} ms/step"
    return f"{loss}{rate} {speed} ({split})"
