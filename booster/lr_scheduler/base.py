"""Base classes of the schedulers: fixed total number of steps, late param groups, exact resumption."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster.errors import ConfigError
from booster.validation import is_int

LearningRate = float | Tensor


def cosine_annealing(base_lr: LearningRate, step: int, num_steps: int, eta_min: float) -> LearningRate:
    """Cosine annealing from `base_lr` at step 0 to `eta_min` at step `num_steps`."""
    return eta_min + (base_lr - eta_min) * (1 + math.cos(math.pi * step / num_steps)) / 2


def polynomial_decay(base_lr: LearningRate, step: int, num_steps: int, end_lr: float, power: float) -> LearningRate:
    """Polynomial decay from `base_lr` at step 0 to `end_lr` at step `num_steps`."""
    left: float = (1 - step / num_steps) ** power
    return end_lr + (base_lr - end_lr) * left


def check_optimizer(optimizer: Any, scheduler: str) -> None:
    """Raise `ConfigError` unless this is an optimizer, boosted or not."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{scheduler} was given a {type(optimizer).__name__} in place of an optimizer: write"
            f" {scheduler}(optimizer, total_steps, ...)"
        )


def check_steps(name: str, steps: Any, minimum: int = 0) -> int:
    """Return a number of steps as an int; raise `ConfigError` unless it is an integer of at least `minimum`."""
    if not is_int(steps):
        hint = f"int({steps!r} * total_steps)" if isinstance(steps, float) and 0 < steps < 1 else "an int"
        raise ConfigError(f"{name}={steps!r} is not an integer number of steps: give {hint}")
    if steps < minimum:
        raise ConfigError(f"{name}={steps} is less than {minimum}: give {minimum} or more")
    return int(steps)


def check_total_steps(total_steps: Any) -> int:
    """Return the total number of steps as an int; raise `ConfigError` unless it is a positive integer."""
    if not is_int(total_steps):
        raise ConfigError(
            f"total_steps={total_steps!r} is not an integer: give the total number of training steps right after the"
            " optimizer, before the arguments of torch's scheduler of this name"
        )
    return check_steps("total_steps", total_steps, 1)


def check_warmup_steps(warmup_steps: Any, total_steps: int) -> int:
    """Return a number of warmup steps as an int; raise `ConfigError` if it leaves no step after warmup."""
    steps = check_steps("warmup_steps", warmup_steps)
    if steps >= total_steps:
        raise ConfigError(
            f"warmup_steps={steps} leaves none of total_steps={total_steps} after warmup: give from 0 to"
            f" {total_steps - 1}; total_steps includes warmup"
        )
    return steps


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)  # also numpy's, which are converted to float


def check_number(name: str, value: Any, *, minimum: float = 0.0, is_minimum_allowed: bool = True) -> float:
    """Return a number as a float; raise `ConfigError` if it is not finite or out of range."""
    is_finite = _is_real(value) and math.isfinite(value)
    if not is_finite or value < minimum or (value == minimum and not is_minimum_allowed):
        bound = f"{minimum} or more" if is_minimum_allowed else f"more than {minimum}"
        raise ConfigError(f"{name}={value!r} is out of range: give a finite number of {bound}")
    return float(value)


def check_fraction(name: str, value: Any, *, is_one_allowed: bool) -> float:
    """Return a fraction of the steps, from 0 to 1, as a float; raise `ConfigError` if it is none."""
    bounds = "from 0 to 1" if is_one_allowed else "of at least 0 and less than 1"
    if not _is_real(value) or not (0 <= value < 1 or (value == 1 and is_one_allowed)):
        raise ConfigError(f"{name}={value!r} is not a fraction of the steps: give a number {bounds}")
    return float(value)


def check_milestones(milestones: Any, total_steps: int, warmup_steps: int = 0) -> list[int]:
    """Return ascending milestones between warmup and the last step as ints; else raise `ConfigError`."""
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
    """Raise `ConfigError` unless a group's learning rate is a number."""
    if not _is_real(lr) and not (isinstance(lr, Tensor) and lr.numel() == 1):
        raise ConfigError(
            f"param group {index} has lr={lr!r}, which is not a number: build the optimizer with a number as lr"
        )


def check_last_epoch(last_epoch: Any, total_steps: int, groups: Sequence[dict[str, Any]], keys: Iterable[str]) -> None:
    """Raise `ConfigError` unless this is a step's index, or -1 before the first, or if groups lack `keys`."""
    if not is_int(last_epoch) or not -1 <= int(last_epoch) < total_steps:
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


class Schedule(LRScheduler):
    """Base class of schedulers with a fixed total number of steps.

    Every schedule has a closed form over the steps taken, from 0 to `total_steps`, scaled by the base learning rates:
    `_get_closed_form_lr`, as torch names it. Most of torch's schedulers are recursive instead: they compute a learning
    rate from the previous one, so that external changes persist and schedulers can be chained. Where torch has the
    schedule, its recursion is used; the closed form, equal up to rounding, serves where there is no previous learning
    rate: `last_epoch`, `step(epoch)` and late param groups. All other schedules are a `CurveSchedule`, which uses the
    closed form alone.

    A subclass lists torch's scheduler after this class among its bases, or derives from `CurveSchedule`. Its
    constructor sets the attributes of `SETTINGS`, then calls `_check`, then torch's constructor.

    After `total_steps` steps learning rates are constant. A param group that is added to the optimizer later gets, at
    the next `step()`, the learning rate that it would have if it had been there from the start.

    Attributes:
        total_steps: Total number of training steps, including warmup.
        SETTINGS: Names of the attributes that define the curve; a state loads only if they are equal.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("total_steps",)
    _FINAL_LR: ClassVar[str | None] = None
    """Name of the setting with the final learning rate, below which no group may start."""

    total_steps: int

    def _check(self, optimizer: Optimizer, last_epoch: int) -> None:
        """Raise ConfigError for invalid arguments, before the optimizer is modified."""
        check_optimizer(optimizer, type(self).__name__)
        check_last_epoch(last_epoch, self.total_steps, optimizer.param_groups, self._group_keys(optimizer))
        for index, group in enumerate(optimizer.param_groups):
            self._check_learning_rate(group, index)

    def _check_learning_rate(self, group: dict[str, Any], index: int) -> None:
        base_lr = group.get("initial_lr", group["lr"])
        check_learning_rate(base_lr, index)
        name = self._FINAL_LR
        if name is not None and float(base_lr) < getattr(self, name) * (1 - 1e-6):  # fp32 tensors round the same number
            raise ConfigError(
                f"{name}={getattr(self, name):g} is more than the learning rate {float(base_lr):g} of param group"
                f" {index}, which would increase to it: give a smaller {name}, such as {name}=0.0"
            )

    def _group_keys(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Return the keys of the optimizer's groups that the schedule writes."""
        return ("lr", "initial_lr")

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next step; call it after the optimizer's `step()`.

        Args:
            epoch: Number of steps taken, deprecated in torch; optional, defaults to one more than before.

        Raises:
            ConfigError: A param group was removed, or an added one is not valid for the schedule.
        """
        self._add_new_groups()
        super().step(epoch)

    def get_lr(self) -> list[LearningRate]:
        """Return the learning rates of all groups; internal to `step`, users call `get_last_lr`."""
        if self._step_count == 1 and self.last_epoch > 0:  # in the constructor: there is no previous learning rate
            return self._get_closed_form_lr()
        if self.last_epoch > self.total_steps:
            return [copy_hyperparameter(group["lr"]) for group in self.optimizer.param_groups]
        return super().get_lr()

    def _get_closed_form_lr(self) -> list[LearningRate]:
        taken = self.last_epoch
        self.last_epoch = min(taken, self.total_steps)
        try:
            return super()._get_closed_form_lr()  # type: ignore[misc, no-any-return]  # of torch's class beside this one
        finally:
            self.last_epoch = taken

    def _add_new_groups(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) < len(self.base_lrs):
            raise ConfigError(
                f"the optimizer has {len(groups)} param groups, but {type(self).__name__} started with"
                f" {len(self.base_lrs)}: groups may be added, not removed; build another scheduler"
            )
        for index in range(len(self.base_lrs), len(groups)):
            self._add_group(groups[index], index)

    def _add_group(self, group: dict[str, Any], index: int) -> None:
        self._check_learning_rate(group, index)
        base_lr = group.get("initial_lr", group["lr"])
        group["initial_lr"] = copy_hyperparameter(base_lr)
        self.base_lrs.append(copy_hyperparameter(base_lr))
        _set_hyperparameter(group, "lr", self._get_closed_form_lr()[index])

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state of the scheduler, and the current values that it wrote into the optimizer's groups."""
        state: dict[str, Any] = super().state_dict()
        for key in ("base_lrs", "_last_lr"):
            state[key] = [copy_hyperparameter(value) for value in state[key]]
        state["param_groups"] = [
            {key: copy_hyperparameter(group[key]) for key in self._group_keys(self.optimizer) if key in group}
            for group in self.optimizer.param_groups
        ]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state and set the optimizer's learning rates.

        So the optimizer may be loaded before, after or not at all.

        Raises:
            ConfigError: See `check_state_dict`; nothing was changed.
        """
        self.check_state_dict(state_dict)
        known = super().state_dict().keys()
        super().load_state_dict({key: value for key, value in state_dict.items() if key in known})
        groups = self.optimizer.param_groups
        for group, saved in zip(groups, state_dict["param_groups"], strict=True):
            for key in self._group_keys(self.optimizer):
                if key in saved:
                    _set_hyperparameter(group, key, saved[key], like=group["lr"])
                else:  # the group was added after the last step
                    group.pop(key, None)
        for name in ("base_lrs", "_last_lr"):
            values = [_like(value, group["lr"]) for value, group in zip(state_dict[name], groups, strict=False)]
            setattr(self, name, values)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that `load_state_dict` accepts a state.

        Raises:
            ConfigError: The state has another class, other settings, or other param groups of the optimizer.
        """
        name = type(self).__name__
        wanted = (*self.SETTINGS, "last_epoch", "base_lrs", "_last_lr", "param_groups")
        missing = [key for key in wanted if key not in state_dict]
        if missing:
            raise ConfigError(
                f"the state has no {missing[0]!r}, so it is not of booster.lr_scheduler.{name}: load a state_dict() of"
                f" this class, or load the optimizer alone and build {name}(optimizer, total_steps, ...,"
                " last_epoch=steps_taken - 1)"
            )
        if not isinstance(state_dict["last_epoch"], int):
            raise ConfigError(
                f"the state has last_epoch={state_dict['last_epoch']!r:.80}, which is not an int: load a result of"
                " state_dict()"
            )
        self._check_settings(state_dict)
        groups, num_groups = state_dict["param_groups"], len(self.optimizer.param_groups)
        if len(groups) != num_groups or max(len(state_dict[key]) for key in ("base_lrs", "_last_lr")) > num_groups:
            raise ConfigError(
                f"the state is of an optimizer with {len(groups)} param groups, but this one has {num_groups}: build"
                " the optimizer with the saved groups"
            )
        own = [key for key in self._group_keys(self.optimizer) if key in self.optimizer.defaults]
        missing = [key for key in own for group in groups if key not in group]
        if missing:
            raise ConfigError(
                f"the state has no {missing[0]!r} of a param group, but this schedule sets the {missing[0]} of"
                f" {type(self.optimizer).__name__}: build the optimizer class that was saved"
            )

    def _check_settings(self, state_dict: Mapping[str, Any]) -> None:
        _check_equal_settings(self, {key: (state_dict[key], getattr(self, key)) for key in self.SETTINGS}, state_dict)


class CurveSchedule(Schedule):
    """Base class of schedules that torch does not have: closed form only, after a linear warmup.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate.
    """

    warmup_steps: int

    def __init__(self, optimizer: Optimizer, last_epoch: int) -> None:
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def _after_warmup(self, base_lr: LearningRate, step: int, num_steps: int) -> LearningRate:
        """Return the learning rate of a group after `step` of the `num_steps` steps after warmup."""

    def _get_closed_form_lr(self) -> list[LearningRate]:
        step = min(self.last_epoch, self.total_steps) - self.warmup_steps
        if step < 0:
            return [base_lr * ((step + self.warmup_steps + 1) / self.warmup_steps) for base_lr in self.base_lrs]
        num_steps = self.total_steps - self.warmup_steps
        return [self._after_warmup(base_lr, step, num_steps) for base_lr in self.base_lrs]

    def get_lr(self) -> list[LearningRate]:
        """Return the learning rates of all groups; internal to `step`, users call `get_last_lr`."""
        return self._get_closed_form_lr()


# Note [Settings of torch's schedulers]
# torch's `load_state_dict` takes over the settings of the scheduler that was saved, which the state has beside what
# steps change. Settings are the attributes with the names of the constructor's arguments, also in plural or with an
# underscore, and those that are computed from them. Functions and tensors are not compared; classes of users may change
# any attribute in a step, so theirs are not, either.

_COMPUTED_SETTINGS = ("total_size", "step_ratio", "_schedule_phases", "_anneal_func_type")


def check_scheduler_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Check that a scheduler accepts a state and stays the schedule that it was built as. Not collective.

    Args:
        scheduler: Scheduler of this package, of torch or of the user.
        state: What is about to be loaded into it.

    Raises:
        ConfigError: The state is of a scheduler with other settings; nothing was changed.
    """
    if hasattr(scheduler, "check_state_dict"):
        scheduler.check_state_dict(state)
    elif type(scheduler).__module__.startswith("torch.optim."):
        _check_settings_of_torch(scheduler, state)


def _check_settings_of_torch(scheduler: Any, state: Mapping[str, Any]) -> None:
    """See Note [Settings of torch's schedulers]."""
    arguments = [one for one in inspect.signature(scheduler.__init__).parameters if one != "last_epoch"]
    of_groups = [f"{one}s" for one in arguments]
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in (*arguments, *of_groups, *(f"_{one}" for one in arguments), *_COMPUTED_SETTINGS):
        if name not in state or not hasattr(scheduler, name):
            continue
        saved, given = _as_list(state[name]), _as_list(getattr(scheduler, name))
        # Groups that were added later lengthen one of the lists at the next step.
        if name not in of_groups or not isinstance(saved, list) or len(saved) == len(given):
            pairs[name] = saved, given
    saved_inner, inner = pairs.pop("_schedulers", ((), ()))
    if len(inner) != len(saved_inner):
        pairs["number of schedulers"] = len(saved_inner), len(inner)
    _check_equal_settings(scheduler, {name: pair for name, pair in pairs.items() if all(map(_is_plain, pair))}, state)
    for one, one_state in zip(inner, saved_inner, strict=True):
        check_scheduler_state(one, one_state)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))


def _check_equal_settings(
    scheduler: LRScheduler, pairs: Mapping[str, tuple[Any, Any]], state: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` unless the saved and the given value of each setting are equal."""
    changed = {name.removeprefix("_"): pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not changed:
        return
    saved, given = (
        ", ".join(f"{name}={_format_setting(pair[index])}" for name, pair in changed.items()) for index in (0, 1)
    )
    steps = state.get("last_epoch") if "last_epoch" in inspect.signature(type(scheduler)).parameters else None
    start = f" and build this one with last_epoch={steps - 1}" if isinstance(steps, int) else ""
    raise ConfigError(
        f"the state is of a {type(scheduler).__name__} with {saved}, but this one has {given}: build it with {saved}"
        f" to resume exactly; for another schedule load the optimizer alone{start}"
    )


def copy_hyperparameter(value: Any) -> Any:
    """Return a copy of a hyperparameter that shares no memory with it."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _set_hyperparameter(group: dict[str, Any], key: str, value: Any, like: Any = None) -> None:
    """Set a hyperparameter of a group, of the type of `like` if it is new to it."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(float(value))  # in place, as compiled steps refer to it
    else:
        group[key] = _like(value, group.get(key, like))


def _like(value: Any, other: Any) -> Any:
    if isinstance(other, Tensor):
        return torch.as_tensor(value, dtype=other.dtype, device=other.device).detach().clone()
    return value.item() if isinstance(value, Tensor) else value


def _format_setting(value: Any) -> str:
    listed = sorted(value.elements()) if hasattr(value, "elements") else value
    return repr(listed)[:80]
