"""What the schedulers refuse, before the optimizer is touched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from booster.errors import ConfigError

__all__ = [
    "require_floor",
    "require_fraction",
    "require_last_epoch",
    "require_learning_rate",
    "require_milestones",
    "require_number",
    "require_optimizer",
    "require_steps",
    "require_total_steps",
    "require_warmup_steps",
]


def require_optimizer(optimizer: Any, scheduler: str) -> None:
    """Return if this is an optimizer, boosted or not.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{scheduler} was given a {type(optimizer).__name__} in place of an optimizer, and it sets the learning"
            f" rates of one: write {scheduler}(optimizer, total_steps, ...)"
        )


def require_steps(name: str, steps: Any, least: int = 0) -> int:
    """Return a number of steps as an int.

    Raises:
        ConfigError: It is no whole number from `least` on.
    """
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        hint = f"int({steps!r} * total_steps)" if isinstance(steps, float) and 0 < steps < 1 else "an int"
        raise ConfigError(f"{name}={steps!r} is no whole number, and steps are counted: give {hint}")
    if steps < least:
        raise ConfigError(f"{name}={steps} is less than {least}, and there are no such steps: give {least} or more")
    return int(steps)


def require_total_steps(total_steps: Any) -> int:
    """Return the number of steps of the whole run as an int.

    Raises:
        ConfigError: It is no whole number from 1 on.
    """
    if isinstance(total_steps, bool) or not isinstance(total_steps, Integral):
        raise ConfigError(
            f"total_steps={total_steps!r} is no whole number, and every scheduler here knows how many steps the run"
            " has: give that number right after the optimizer, before what torch's scheduler of this name takes"
        )
    return require_steps("total_steps", total_steps, 1)


def require_warmup_steps(warmup_steps: Any, total_steps: int) -> int:
    """Return the number of steps of the warm-up as an int.

    Raises:
        ConfigError: It is no whole number, or leaves no step for what comes after it.
    """
    steps = require_steps("warmup_steps", warmup_steps)
    if steps >= total_steps:
        raise ConfigError(
            f"warmup_steps={steps} leaves none of total_steps={total_steps} for the schedule after the warm-up: give"
            f" from 0 to {total_steps - 1}; total_steps counts the warm-up too"
        )
    return steps


def require_number(name: str, value: Any, *, least: float = 0.0, is_least_allowed: bool = True) -> float:
    """Return a number as a float.

    Raises:
        ConfigError: It is no finite number, or less than `least`.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least or (value == least and not is_least_allowed):
        bound = f"{least} or more" if is_least_allowed else f"more than {least}"
        raise ConfigError(f"{name}={value!r} can't be computed with: give a finite number of {bound}")
    return float(value)


def require_fraction(name: str, value: Any, *, is_one_allowed: bool) -> float:
    """Return a part of the steps as a float.

    Raises:
        ConfigError: It is no number from 0 to 1, or is 1 where that can't work.
    """
    bounds = "from 0 to 1" if is_one_allowed else "from 0 on and less than 1"
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (0 <= value < 1 or (value == 1 and is_one_allowed)):
        raise ConfigError(f"{name}={value!r} is the part of the steps before the annealing: give a number {bounds}")
    return float(value)


def require_milestones(milestones: Any, total_steps: int, warmup_steps: int = 0) -> list[int]:
    """Return the milestones as ints.

    Raises:
        ConfigError: There are none, they are in another order than that of the steps, or in the warm-up, or no step
            of the run comes after one.
    """
    given = list(milestones) if isinstance(milestones, Iterable) and not isinstance(milestones, str) else []
    if not given:
        raise ConfigError(
            f"milestones={milestones!r} names no step, so the learning rate would never change: give the steps from"
            f" which it is smaller, such as milestones=[{total_steps // 2 or 1}, {3 * total_steps // 4 or 1}]"
        )
    steps = [require_steps(f"milestones[{index}]", step) for index, step in enumerate(given)]
    if steps != sorted(steps):
        raise ConfigError(f"milestones={steps} are not in the order of the steps: give milestones={sorted(steps)}")
    least = max(1, warmup_steps)
    late, early = [step for step in steps if step >= total_steps], [step for step in steps if step < least]
    if late or early:
        why = f"{late[0]} comes after the last step" if late else f"{early[0]} comes before the end of the warm-up"
        why = "0 comes before the first step" if early and not warmup_steps else why
        bounds = f"give steps from {least} to {total_steps - 1}" if least < total_steps else "give more total_steps"
        raise ConfigError(
            f"milestones={steps} with total_steps={total_steps}"
            + (f" and warmup_steps={warmup_steps}" if warmup_steps else "")
            + f": {why}, so it could not be kept; {bounds}, counted from the beginning of the run"
        )
    return steps


def require_learning_rate(lr: Any, index: int) -> None:
    """Return if a group has a learning rate that a schedule can multiply.

    Raises:
        ConfigError: It is no number.
    """
    is_number = (isinstance(lr, Real) and not isinstance(lr, bool)) or (isinstance(lr, Tensor) and lr.numel() == 1)
    if not is_number:
        raise ConfigError(
            f"param group {index} has lr={lr!r}, and a schedule is a part of a learning rate: build the optimizer with"
            " a number as lr"
        )


def require_floor(name: str, floor: float, base_lr: float | Tensor, index: int) -> None:
    """Return if a group's learning rate can fall to the schedule's last one.

    Raises:
        ConfigError: It would rise.
    """
    if float(base_lr) < floor * (1 - 1e-6):  # a tensor in fp32 rounds the same number
        raise ConfigError(
            f"{name}={floor:g} is more than the learning rate {float(base_lr):g} of param group {index}, which would"
            f" rise to it: give a smaller {name}, such as {name}=0.0"
        )


def require_last_epoch(last_epoch: Any, total_steps: int, groups: Sequence[dict[str, Any]], keys: Iterable[str]) -> int:
    """Return the number of the last step taken, -1 before the first.

    Raises:
        ConfigError: It is no such number, or the groups lack what a schedule in its middle goes on from.
    """
    is_whole = isinstance(last_epoch, Integral) and not isinstance(last_epoch, bool)
    if not is_whole or not -1 <= int(last_epoch) < total_steps:
        raise ConfigError(
            f"last_epoch={last_epoch!r} is no step of total_steps={total_steps}: give -1 to begin, or the number of"
            f" steps taken less one, up to {total_steps - 1}"
        )
    for index, group in enumerate(groups if int(last_epoch) >= 0 else ()):
        missing = [key for key in keys if key not in group]
        if missing:
            raise ConfigError(
                f"last_epoch={last_epoch} begins in the middle, and param group {index} has no {missing[0]!r} to go on"
                " from: load the optimizer that was saved first, or leave last_epoch out and load the scheduler's state"
            )
    return int(last_epoch)
