"""Logger with rank prefixes, one line per record."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch.distributed as dist

from .errors import ConfigError

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_loggers: dict[str, DistributedLogger] = {}


def get_dist_logger(name: str = "booster") -> DistributedLogger:
    """Return the logger of that name, the same object each time. Works before, during and after a launch."""
    if name not in _loggers:
        _loggers[name] = DistributedLogger(name)
    return _loggers[name]


def log_rank_zero(message: str, name: str = "booster") -> None:
    """Log one line on rank 0."""
    get_dist_logger(name).info(message, ranks=[0])


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("booster",)) -> None:
    """Set the level of existing loggers of Python's logging to WARNING, as ColossalAI's function does.

    Args:
        include: Names of these loggers; optional, defaults to all.
        exclude: Names that are left out then, with the loggers below them.
    """
    for name in list(logging.Logger.manager.loggerDict):
        is_excluded = any(name == one or name.startswith(f"{one}.") for one in exclude)
        if name in include if include is not None else not is_excluded:
            logging.getLogger(name).setLevel(logging.WARNING)


class DistributedLogger:
    """Logger that writes `[time] [rank 0/2] INFO name: message` to stderr, on all or selected ranks.

    The argument `ranks` of every level selects global ranks; it defaults to all. No method communicates. Line breaks in
    a message are written as `\\n`, so that lines of several ranks cannot interleave within a record.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Does not propagate to the root logger, so the user's logging writes no second line.
        self._logger = logging.getLogger(f"booster.dist_logger.{name}")
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)
        for handler in list(self._logger.handlers):
            self._logger.removeHandler(handler)
        self._add(_StderrHandler())

    def debug(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Write a record of level DEBUG, shown only after `set_level("DEBUG")`."""
        self._log(logging.DEBUG, msg, ranks)

    def info(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Write a record of level INFO."""
        self._log(logging.INFO, msg, ranks)

    def warning(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Write a record of level WARNING."""
        self._log(logging.WARNING, msg, ranks)

    def error(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Write a record of level ERROR."""
        self._log(logging.ERROR, msg, ranks)

    def critical(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Write a record of level CRITICAL."""
        self._log(logging.CRITICAL, msg, ranks)

    def set_level(self, level: str) -> None:
        """Show records of this level and above: "DEBUG", "INFO", "WARNING", "ERROR" or "CRITICAL" (any case).

        Raises:
            ConfigError: The level is unknown.
        """
        if level.upper() not in _LEVELS:
            raise ConfigError(f"level={level!r} is not a logging level: choose one of {', '.join(_LEVELS)}")
        self._logger.setLevel(level.upper())

    def log_to_file(self, path: str | Path, mode: str = "a") -> Path:
        """Write the records also to a file, one per rank. A second call with the same path changes nothing.

        Args:
            path: Path of the file; `run.log` becomes `run.rank3.log` on rank 3 of several. Missing directories are
                made.
            mode: "a" to append, "w" to overwrite.

        Returns:
            The path of this rank's file.

        Raises:
            ConfigError: The mode is unknown, or the path is a directory.
        """
        if mode not in ("a", "w"):
            raise ConfigError(f"mode={mode!r} is not a mode of a log: choose 'a' (append) or 'w' (overwrite)")
        rank, world_size = _rank_and_world_size()
        path = Path(path)
        if world_size > 1:
            path = path.with_suffix(f".rank{rank}{path.suffix}")
        if path.is_dir():
            raise ConfigError(f"path={str(path)!r} is a directory: give the path of a file for the log")
        if os.path.abspath(path) not in [handler.baseFilename for handler in self._file_handlers()]:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._add(logging.FileHandler(path, mode=mode, encoding="utf-8"))
        return path

    def close_files(self) -> None:
        """Close the files of `log_to_file`; later records are written to stderr only."""
        for handler in self._file_handlers():
            self._logger.removeHandler(handler)
            handler.close()

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(_OneLine(self.name))
        self._logger.addHandler(handler)

    def _file_handlers(self) -> list[logging.FileHandler]:
        return [handler for handler in self._logger.handlers if isinstance(handler, logging.FileHandler)]

    def _log(self, level: int, msg: object, ranks: Sequence[int] | None) -> None:
        if ranks is None or _rank_and_world_size()[0] in ranks:
            self._logger.log(level, "%s", msg)


class _OneLine(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._shown_name = name

    def format(self, record: logging.LogRecord) -> str:
        rank, world_size = _rank_and_world_size()
        message = "\\n".join(record.getMessage().splitlines())
        time = self.formatTime(record, self.datefmt)
        return f"[{time}] [rank {rank}/{world_size}] {record.levelname} {self._shown_name}: {message}"


# Python 3.10 has no parameters of this class.
if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler


class _StderrHandler(_StreamHandler):
    """Handler for the current sys.stderr, which a notebook or a test may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # read-only: it always writes to sys.stderr
        return sys.stderr


def _rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size of the process group, before a launch those of the environment, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdigit() and world_size.isdigit() else (0, 1)
