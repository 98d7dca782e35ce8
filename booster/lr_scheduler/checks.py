"""Validation of scheduler arguments, before the optimizer is modified."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from booster.errors import ConfigError

__all__ = [
    "check_floor",
    "check_fraction",
    "check_last_epoch",
    "check_learning_rate",
    "check_milestones",
    "check_number",
    "check_optimizer",
    "check_steps",
    "check_total_steps",
    "check_warmup_steps",
]


def check_optimizer(optimizer: Any, scheduler: str) -> None:
    """Check that this is an optimizer, boosted or not.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{scheduler} was given a {type(optimizer).__name__} in place of an optimizer: write"
            f" {scheduler}(optimizer, total_steps, ...)"
        )


def check_steps(name: str, steps: Any, minimum: int = 0) -> int:
    """Return a number of steps as an int.

    Raises:
        ConfigError: It is not an integer of at least `min_nodes`.
    """
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        hint = f"int({steps!r} * total_steps)" if isinstance(steps, float) and 0 < steps < 1 else "an int"
        raise ConfigError(f"{name}={steps!r} is not an integer number of steps: give {hint}")
    if steps < minimum:
        raise ConfigError(f"{name}={steps} is less than {minimum}: give {minimum} or more")
    return int(steps)


def check_total_steps(total_steps: Any) -> int:
    """Return the total number of steps as an int.

    Raises:
        ConfigError: It is not a positive integer.
    """
    if isinstance(total_steps, bool) or not isinstance(total_steps, Integral):
        raise ConfigError(
            f"total_steps={total_steps!r} is not an integer: give the total number of training steps right after the"
            " optimizer, before the arguments of torch's scheduler of this name"
        )
    return check_steps("total_steps", total_steps, 1)


def check_warmup_steps(warmup_steps: Any, total_steps: int) -> int:
    """Return the number of warmup steps as an int.

    Raises:
        ConfigError: It is not a non-negative integer, or leaves no step after warmup.
    """
    steps = check_steps("warmup_steps", warmup_steps)
    if steps >= total_steps:
        raise ConfigError(
            f"warmup_steps={steps} leaves none of total_steps={total_steps} after warmup: give from 0 to"
            f" {total_steps - 1}; total_steps includes warmup"
        )
    return steps


def check_number(name: str, value: Any, *, minimum: float = 0.0, is_minimum_allowed: bool = True) -> float:
    """Return a number as a float.

    Raises:
        ConfigError: It is not a finite number, or less than `min_nodes`.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < minimum or (value == minimum and not is_minimum_allowed):
        bound = f"{minimum} or more" if is_minimum_allowed else f"more than {minimum}"
        raise ConfigError(f"{name}={value!r} is out of range: give a finite number of {bound}")
    return float(value)


def check_fraction(name: str, value: Any, *, is_one_allowed: bool) -> float:
    """Return a fraction of the steps as a float.

    Raises:
        ConfigError: It is not a number from 0 to 1, or is 1 and that is not allowed.
    """
    bounds = "from 0 to 1" if is_one_allowed else "of at least 0 and less than 1"
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (0 <= value < 1 or (value == 1 and is_one_allowed)):
        raise ConfigError(f"{name}={value!r} is not a fraction of the steps: give a number {bounds}")
    return float(value)


def check_milestones(milestones: Any, total_steps: int, warmup_steps: int = 0) -> list[int]:
    """Return the milestones as ints.

    Raises:
        ConfigError: There are none, they are not ascending, or one is within warmup or after the last step.
    """
    given = list(milestones) if isinstance(milestones, Iterable) and not isinstance(milestones, str) else []
    if not given:
        raise ConfigError(
            f"milestones={milestones!r} has no step, so the learning rate would never decay: give steps, such as"
            f" milestones=[{total_steps // 2 or 1}, {3 * total_steps // 4 or 1}]"
        )
    steps = [check_steps(f"milestones[{index}]", step) for index, step in enumerate(given)]
    if steps != sorted(steps):
        raise ConfigError(f"milestones={steps} are not in ascending order: give milestones={sorted(steps)}")
    first_step = max(1, warmup_steps)
    late, early = [step for step in steps if step >= total_steps], [step for step in steps if step < first_step]
    if late or early:
        why = f"{late[0]} is after the last step" if late else f"{early[0]} is within warmup"
        why = "0 is before the first step" if early and not warmup_steps else why
        bounds = (
            f"give steps from {first_step} to {total_steps - 1}"
            if first_step < total_steps
            else "give more total_steps"
        )
        raise ConfigError(
            f"milestones={steps} with total_steps={total_steps}"
            + (f" and warmup_steps={warmup_steps}" if warmup_steps else "")
            + f": {why}; {bounds}, counted from the start of the run"
        )
    return steps


def check_learning_rate(lr: Any, index: int) -> None:
    """Check that a group's learning rate is a number.

    Raises:
        ConfigError: It is not.
    """
    is_number = (isinstance(lr, Real) and not isinstance(lr, bool)) or (isinstance(lr, Tensor) and lr.numel() == 1)
    if not is_number:
        raise ConfigError(
            f"param group {index} has lr={lr!r}, which is not a number: build the optimizer with a number as lr"
        )


def check_floor(name: str, floor: float, base_lr: float | Tensor, index: int) -> None:
    """Check that a group's learning rate is not below the schedule's final one.

    Raises:
        ConfigError: It is, so it would increase.
    """
    if float(base_lr) < floor * (1 - 1e-6):  # fp32 tensors round the same number
        raise ConfigError(
            f"{name}={floor:g} is more than the learning rate {float(base_lr):g} of param group {index}, which would"
            f" increase to it: give a smaller {name}, such as {name}=0.0"
        )


def check_last_epoch(last_epoch: Any, total_steps: int, groups: Sequence[dict[str, Any]], keys: Iterable[str]) -> int:
    """Return the index of the last step, -1 before the first.

    Raises:
        ConfigError: It is out of range, or the groups lack keys that are required for resuming.
    """
    is_int = isinstance(last_epoch, Integral) and not isinstance(last_epoch, bool)
    if not is_int or not -1 <= int(last_epoch) < total_steps:
        raise ConfigError(
            f"last_epoch={last_epoch!r} is not a step of total_steps={total_steps}: give -1 to start, or the number of"
            f" steps taken minus one, up to {total_steps - 1}"
        )
    for index, group in enumerate(groups if int(last_epoch) >= 0 else ()):
        missing = [key for key in keys if key not in group]
        if missing:
            raise ConfigError(
                f"last_epoch={last_epoch} resumes a schedule, but param group {index} has no {missing[0]!r}: load the"
                " saved optimizer first, or omit last_epoch and load the scheduler's state"
            )
    return int(last_epoch)
