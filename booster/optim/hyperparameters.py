"""What optimizers of this package refuse in a param group: one sentence each, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from booster.errors import ConfigError

__all__ = ["require_amount", "require_flag", "require_fractions", "require_learning_rate"]


def require_learning_rate(group: Mapping[str, Any]) -> None:
    """Returns if a group's lr can be multiplied with.

    Raises:
        ConfigError: It can't.
    """
    lr = group["lr"]
    if lr is None:
        raise ConfigError("lr=None is no length of a step, and this optimizer finds none by itself: give lr=2e-4 or so")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of shape {tuple(lr.shape)}: give one with one element, or a number")
    require_amount(group, "lr")


def require_amount(
    group: Mapping[str, Any], name: str, *, is_positive: bool = False, below: float = math.inf, why: str = ""
) -> None:
    """Returns if a hyperparameter is a finite number from 0 on.

    Args:
        group: A param group, defaults included.
        name: Of the hyperparameter.
        is_positive: 0 does not do either.
        below: What it must be less than.
        why: What would go wrong, to be put into the message.

    Raises:
        ConfigError: It is not.
    """
    value = group[name]
    if _is_number(value):
        number = float(value)
        if math.isfinite(number) and (number > 0 if is_positive else number >= 0) and number < below:
            return
    kind = "a positive finite number" if is_positive else "a finite number from 0 on"
    limit = "" if math.isinf(below) else f", less than {below:g}"
    raise ConfigError(f"{name}={value!r}{' ' + why if why else ' can not be computed with'}: give {kind}{limit}")


def require_fractions(group: Mapping[str, Any], name: str, count: int, *, example: tuple[float, ...]) -> None:
    """Returns if a hyperparameter is so many numbers from 0 on, each less than 1.

    Raises:
        ConfigError: It is not.
    """
    values = group[name]
    is_row = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
    if not is_row or not all(_is_number(value) and 0.0 <= float(value) < 1.0 for value in values):
        raise ConfigError(
            f"{name}={values!r} are no decay rates, which keep a part of what was: give {count} numbers from 0 on and"
            f" less than 1, such as {example}"
        )


def require_flag(group: Mapping[str, Any], name: str) -> None:
    """Returns if a hyperparameter is True or False.

    Raises:
        ConfigError: It is not: an argument may stand in another one's place.
    """
    if not isinstance(group[name], bool):
        raise ConfigError(
            f"{name}={group[name]!r} is no truth value, so an argument may stand in another one's place: give True or"
            " False, and arguments after lr by keyword"
        )


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
