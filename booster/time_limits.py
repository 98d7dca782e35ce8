"""How long this rank waits for the others, which differs between training, set-up and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from booster.errors import ConfigError

__all__ = ["DEFAULT_LIMITS", "TimeLimits", "check_seconds", "set_time_limits", "time_limits"]

_LEAST_SECONDS, _MOST_SECONDS = 0.001, 1e9  # torch counts milliseconds, and takes 0 of them for no limit at all


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """The longest waits for another rank, in seconds.

    Attributes:
        training: In a collective or a message of the training loop.
        setup: For the ranks to find each other, to make groups, and in `boost()`.
        checkpoint: In a save or a load.

    Raises:
        ConfigError: One of them is no number of seconds.
    """

    training: float = 600
    setup: float = 1800
    checkpoint: float = 1800

    def __post_init__(self) -> None:
        for field in fields(self):
            check_seconds(field.name, getattr(self, field.name))


def check_seconds(name: str, seconds: Any) -> None:
    """Raises `ConfigError` unless it is a time that a rank can wait."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number:
        raise ConfigError(f"{name}={seconds!r} is no number of seconds: give one above 0, such as 600")
    if not seconds > 0:
        raise ConfigError(f"{name}={seconds!r} leaves no time to wait for others: give a number of seconds above 0")
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise ConfigError(
            f"{name}={seconds!r} can't be waited for: no wait is without an end, as a rank that is lost would keep the"
            f" others for ever, nor shorter than a message. Give seconds from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}"
        )


DEFAULT_LIMITS = TimeLimits()
_limits = DEFAULT_LIMITS


def time_limits() -> TimeLimits:
    """Returns what the launch was given; before one, and without, the defaults."""
    return _limits


def set_time_limits(limits: TimeLimits | None) -> None:
    """Changes them for groups that are made and waits that begin from now on; None: back to the defaults."""
    global _limits
    _limits = DEFAULT_LIMITS if limits is None else limits
