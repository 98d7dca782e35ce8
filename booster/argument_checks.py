"""Type checks of plain arguments."""

from __future__ import annotations

import math
from numbers import Integral
from os import PathLike
from typing import Any, SupportsFloat

from booster.errors import ConfigError

__all__ = ["check_flag", "check_path", "is_int", "is_number"]


def is_number(value: Any) -> bool:
    """Return whether `value` is a number or a tensor with one element, and neither a bool nor nan."""
    return isinstance(value, SupportsFloat) and not isinstance(value, bool) and not math.isnan(float(value))


def is_int(value: Any) -> bool:
    """Return whether `value` is an integer of any type, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_flag(name: str, value: Any) -> None:
    """Raise `ConfigError` unless an argument is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be a bool, got {value!r}: pass True or False")


def check_path(name: str, value: Any) -> None:
    """Raise `ConfigError` unless an argument is a string or a path."""
    if not isinstance(value, (str, PathLike)):
        raise ConfigError(f"{name} must be a path, got {value!r} ({type(value).__name__}): give one such as 'runs/a'")
