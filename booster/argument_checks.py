"""Whether the values of plain arguments are of the kind that they must be."""

from __future__ import annotations

import math
from numbers import Integral
from os import PathLike
from typing import Any, SupportsFloat

from booster.errors import ConfigError

__all__ = ["check_flag", "check_path", "is_number", "is_whole_number"]


def is_number(value: Any) -> bool:
    """Returns whether an argument is a number, or a tensor with one; True, False and nan are none."""
    return isinstance(value, SupportsFloat) and not isinstance(value, bool) and not math.isnan(float(value))


def is_whole_number(value: Any) -> bool:
    """Returns whether an argument is an integer of any kind; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_flag(name: str, value: Any) -> None:
    """Returns if an argument is True or False.

    Raises:
        ConfigError: It is something else, which might be taken for either.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is no truth value: pass True or False")


def check_path(name: str, value: Any) -> None:
    """Returns if an argument can be the path of a file or a directory.

    Raises:
        ConfigError: It is neither a string nor a path.
    """
    if not isinstance(value, (str, PathLike)):
        raise ConfigError(
            f"{name}={value!r} is a {type(value).__name__}, which names no file: give a path, such as 'runs/a'"
        )
