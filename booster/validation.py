"""Type checks of plain arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from numbers import Integral
from os import PathLike
from typing import Any, SupportsFloat, TypeGuard

from .errors import ConfigError


def is_number(value: Any) -> bool:
    """Return whether `value` is a number or a tensor with one element, and neither a bool nor nan."""
    if type(value) in (int, float):  # first: `isinstance` with a protocol takes microseconds, and a step has several
        return not math.isnan(value)
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(float(value))
    except (RuntimeError, TypeError, ValueError):  # a tensor or an array with another number of elements
        return False


def is_int(value: Any) -> bool:
    """Return whether `value` is an integer of any type, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_count(value: Any, minimum: int = 1) -> TypeGuard[int]:
    """Return whether `value` is an int of at least `minimum`, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def check_count(**arguments: Any) -> None:
    """Raise `ConfigError` unless all arguments, given by name, are ints of at least 1."""
    for name, value in arguments.items():
        if not is_count(value):
            raise ConfigError(f"{name}={value!r} is not a count: give an int of at least 1")


def check_flag(name: str, value: Any, *, reason: str = "", advice: str = "pass True or False") -> None:
    """Raise `ConfigError` unless an argument is a bool.

    Args:
        name: Name of the argument.
        value: The argument.
        reason: What the value suggests, for the message.
        advice: What to write instead, for the message.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be a bool, got {value!r}{reason}: {advice}")


def check_path(name: str, value: Any) -> None:
    """Raise `ConfigError` unless an argument is a string or a path."""
    if not isinstance(value, (str, PathLike)):
        raise ConfigError(f"{name} must be a path, got {value!r} ({type(value).__name__}): give one such as 'runs/a'")


# Advice for errors of ranks that wait for each other in different forwards and backwards.
UNEVEN_CALLS = (
    "every rank must call the model and backward() equally often and in the same order, whatever parts of the model"
    " each uses. Where one rank evaluates alone, as under `if rank == 0`, evaluate on every rank, or inside of"
    " `with model.gathered():`"
)


def error_of(check: Callable[[], object]) -> Exception | None:
    """Return the error that a check raises, to be raised on all ranks, or None if it passes."""
    try:
        check()
    except Exception as error:
        return error
    return None


def is_non_nan_number(value: Any) -> bool:
    """Return whether an argument is a number, and not nan."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def check_clipping(max_norm: Any, norm_type: Any, *, without_clipping: str = "0 for no clipping") -> None:
    """Raise `ConfigError` if an argument of clipping by norm is invalid.

    Args:
        max_norm: Maximum norm.
        norm_type: Order of the norm.
        without_clipping: Number to give where nothing is clipped, for the message.
    """
    if not is_number(max_norm) or max_norm < 0:
        raise ConfigError(
            f"max_norm={max_norm!r} is not a maximum gradient norm: give a positive number, or {without_clipping}"
        )
    if not is_number(norm_type) or norm_type <= 0:
        raise ConfigError(f"norm_type={norm_type!r} is not a norm order: give a positive number, or float('inf')")


def size_from_text(text: str, *, ignores_case: bool = False) -> float | None:
    """Return the bytes of a size with its unit, such as 5GB (10**9 each) or 2GiB (2**30 each); None for other texts.

    Args:
        text: Size to parse.
        ignores_case: If True, take 5gb and 5Gb as well, of which the latter is 5 * 10**9 bits elsewhere.
    """
    pattern = r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B\s*"
    found = re.fullmatch(pattern, text, re.IGNORECASE if ignores_case else 0)
    if found is None:
        return None
    power = "KMGT".index(found[2].upper()) + 1 if found[2] else 0
    return float(float(found[1]) * (1024 if found[3] else 1000) ** power)


def check_replicas(extra_dp_size: Any, world_size: int) -> None:
    """Raise `ConfigError` unless `extra_dp_size` divides the ranks into equal groups that each hold all shards."""
    if not is_count(extra_dp_size) or world_size % extra_dp_size:
        raise ConfigError(
            f"extra_dp_size={extra_dp_size!r} does not divide the {world_size} ranks into equal groups that each hold"
            " all shards: give a divisor of the world size, or 1"
        )
