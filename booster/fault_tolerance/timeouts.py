"""Timeouts of waits for other ranks: in training, set-up and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from booster.errors import ConfigError

_MIN_SECONDS, _MAX_SECONDS = 0.001, 1e9  # torch counts milliseconds, and 0 disables its timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of waits for other ranks, in seconds.

    Attributes:
        training: Timeout of collectives and messages of the training loop.
        setup: Timeout of the rendezvous, of new process groups, and of `boost()`.
        checkpoint: Timeout of collectives in a save or a load.

    Raises:
        ConfigError: A value is not a positive number.
    """

    training: float = 600
    setup: float = 1800
    checkpoint: float = 1800

    def __post_init__(self) -> None:
        for field in fields(self):
            check_seconds(field.name, getattr(self, field.name))


def check_seconds(name: str, seconds: Any) -> None:
    """Raise `ConfigError` unless `seconds` is a valid timeout."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number:
        raise ConfigError(f"{name}={seconds!r} is not a number of seconds: give one above 0, such as 600")
    if not seconds > 0:
        raise ConfigError(f"{name}={seconds!r} leaves no time to wait for others: give a number of seconds above 0")
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise ConfigError(
            f"{name}={seconds!r} is not a possible timeout: a lost rank would block the others without end, or messages"
            f" would be too late. Give seconds from {_MIN_SECONDS:g} to {_MAX_SECONDS:g}"
        )


DEFAULT_TIMEOUTS = Timeouts()
_timeouts = DEFAULT_TIMEOUTS


def timeouts() -> Timeouts:
    """Return the timeouts given to the launch, or the defaults."""
    return _timeouts


def set_timeouts(timeouts: Timeouts | None) -> None:
    """Set the timeouts of new groups and waits; None restores the defaults."""
    global _timeouts
    _timeouts = DEFAULT_TIMEOUTS if timeouts is None else timeouts
