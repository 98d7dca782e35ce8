"""What a Monitor was asked for, checked."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from booster.argument_checks import check_flag
from booster.errors import ConfigError

__all__ = ["MonitorSettings"]


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
