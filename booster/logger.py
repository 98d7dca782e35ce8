"""Log lines that say which rank they come from, one line a record."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from booster.errors import ConfigError

__all__ = ["DistributedLogger", "get_dist_logger"]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_loggers: dict[str, DistributedLogger] = {}


def get_dist_logger(name: str = "booster") -> DistributedLogger:
    """Returns the logger of that name, the same object each time. Works before, during and after a launch."""
    if name not in _loggers:
        _loggers[name] = DistributedLogger(name)
    return _loggers[name]


class DistributedLogger:
    """Writes `[time] [rank 0/2] INFO name: message` to stderr, from all ranks or from those that are asked for.

    Every level takes `ranks`: the world ranks that write the record, None for all of them. No method communicates.
    Line breaks within a message are written as `\\n`, so that lines of several ranks can't mix up a record.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # A branch of its own below the root, which never hears of it: no second line from the user's own logging.
        self._logger = logging.getLogger(f"booster.dist_logger.{name}")
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)
        for handler in list(self._logger.handlers):
            self._logger.removeHandler(handler)
        self._add(_StderrHandler())

    def debug(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Writes a record that is shown only after `set_level("DEBUG")`."""
        self._log(logging.DEBUG, msg, ranks)

    def info(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Writes a record of level INFO."""
        self._log(logging.INFO, msg, ranks)

    def warning(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Writes a record of level WARNING."""
        self._log(logging.WARNING, msg, ranks)

    def error(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Writes a record of level ERROR."""
        self._log(logging.ERROR, msg, ranks)

    def critical(self, msg: object, ranks: Sequence[int] | None = None) -> None:
        """Writes a record of level CRITICAL."""
        self._log(logging.CRITICAL, msg, ranks)

    def set_level(self, level: str) -> None:
        """Shows records of this level and above: "DEBUG", "INFO", "WARNING", "ERROR" or "CRITICAL" (any case).

        Raises:
            ConfigError: There is no such level.
        """
        if level.upper() not in _LEVELS:
            raise ConfigError(f"level={level!r} is no level of a logger: choose one of {', '.join(_LEVELS)}")
        self._logger.setLevel(level.upper())

    def log_to_file(self, path: str | Path, mode: str = "a") -> Path:
        """Writes the records to a file too, each rank to its own; a second call with the same path changes nothing.

        Args:
            path: `run.log` becomes `run.rank3.log` on rank 3 of several; missing folders are made.
            mode: "a" to go on at the end of a file, "w" to begin it anew.

        Returns:
            The path of this rank's file.

        Raises:
            ConfigError: The mode is another, or the path is a directory.
        """
        if mode not in ("a", "w"):
            raise ConfigError(f"mode={mode!r} can't write a log: choose 'a' (go on at the end) or 'w' (begin anew)")
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
        """Closes the files of `log_to_file`; records go to stderr alone again."""
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


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is when the record comes: a notebook or a test may have put another one there."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


def _rank_and_world_size() -> tuple[int, int]:
    """Returns what the process group says, before a launch what the launcher's environment says, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdigit() and world_size.isdigit() else (0, 1)
