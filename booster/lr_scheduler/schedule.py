"""What all schedulers of this package share: a known end, groups that come later, exact states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster.errors import ConfigError
from booster.lr_scheduler.checks import require_last_epoch, require_learning_rate, require_optimizer
from booster.lr_scheduler.curves import LearningRate

__all__ = ["CurveSchedule", "Schedule", "copied", "set_hyperparameter"]

# Note [Curves and recursions]
# Every schedule is a curve over the steps taken, from 0 to total_steps, whose height is a group's base learning rate.
# Most of torch's schedulers compute one learning rate from the one before instead, so that changes from outside last
# and schedulers can be chained. Where torch has the schedule, its own recursion runs, and the curve serves where there
# is no learning rate before: `last_epoch`, `step(epoch)`, and a group that was added later. Both agree but for
# rounding. Where torch has none, the curve is all there is.


class Schedule(LRScheduler):
    """A scheduler that knows the number of steps of the run.

    A subclass names torch's scheduler after this class among its bases, or is a `CurveSchedule`. Its constructor sets
    what is in `SETTINGS`, then calls `_check`, then torch's constructor.

    After `total_steps` steps learning rates stay where they are. A group that is added to the optimizer later gets, at
    the next `step()`, the place on the curve that it would have if it had been there from the beginning with its
    learning rate.

    Attributes:
        total_steps: Steps of the whole run, warm-up included.
        SETTINGS: Attributes that make the curve; a state goes only to a scheduler in which they are the same.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("total_steps",)
    total_steps: int

    def _check(self, optimizer: Optimizer, last_epoch: int) -> None:
        """Raise ConfigError for what can't work, before the optimizer is touched."""
        require_optimizer(optimizer, type(self).__name__)
        require_last_epoch(last_epoch, self.total_steps, optimizer.param_groups, self._group_keys(optimizer))
        for index, group in enumerate(optimizer.param_groups):
            self._check_learning_rate(group, index)

    def _check_learning_rate(self, group: dict[str, Any], index: int) -> None:
        base_lr = group.get("initial_lr", group["lr"])
        require_learning_rate(base_lr, index)
        self._check_base_lr(base_lr, index)

    def _check_base_lr(self, base_lr: LearningRate, index: int) -> None:
        """Raise ConfigError if the schedule can't begin at a group's learning rate."""

    def _group_keys(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Return the names of what the schedule writes into the optimizer's groups."""
        return ("lr", "initial_lr")

    @abstractmethod
    def _curve(self, base_lr: LearningRate, step: int, index: int) -> LearningRate:
        """Return the learning rate of a group after so many steps, from 0 to `total_steps`."""

    # Steps.

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next step; call it after the optimizer's `step()`.

        Args:
            epoch: Deprecated in torch: the number of steps taken; None: one more.

        Raises:
            ConfigError: A group was added or taken away that the schedule can't go on with.
        """
        self._admit_new_groups()
        super().step(epoch)

    def get_lr(self) -> list[LearningRate]:
        """Return the learning rates of all groups for `step`; users call `get_last_lr`."""
        if self._step_count == 1 and self.last_epoch > 0:  # being constructed: there is no learning rate before
            return self._get_closed_form_lr()
        if self.last_epoch > self.total_steps:
            return [copied(group["lr"]) for group in self.optimizer.param_groups]
        return super().get_lr()

    def _get_closed_form_lr(self) -> list[LearningRate]:
        step = min(self.last_epoch, self.total_steps)
        return [self._curve(base_lr, step, index) for index, base_lr in enumerate(self.base_lrs)]

    def _admit_new_groups(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) < len(self.base_lrs):
            raise ConfigError(
                f"the optimizer has {len(groups)} param groups, and {type(self).__name__} began with"
                f" {len(self.base_lrs)}: groups may be added, not removed; build another scheduler"
            )
        for index in range(len(self.base_lrs), len(groups)):
            self._admit(groups[index], index)

    def _admit(self, group: dict[str, Any], index: int) -> None:
        self._check_learning_rate(group, index)
        base_lr = group.get("initial_lr", group["lr"])
        group["initial_lr"] = copied(base_lr)
        self.base_lrs.append(copied(base_lr))
        set_hyperparameter(group, "lr", self._curve(base_lr, min(self.last_epoch, self.total_steps), index))

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state of the scheduler, and what it wrote into the optimizer's groups as they are now."""
        state: dict[str, Any] = super().state_dict()
        for key in ("base_lrs", "_last_lr"):
            state[key] = [copied(value) for value in state[key]]
        state["param_groups"] = [
            {key: copied(group[key]) for key in self._group_keys(self.optimizer) if key in group}
            for group in self.optimizer.param_groups
        ]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned, and sets the optimizer's learning rates.

        So the order in which optimizer and scheduler are loaded does not matter, nor whether the optimizer is.

        Raises:
            ConfigError: See `check_state_dict`. Nothing was changed.
        """
        self.check_state_dict(state_dict)
        known = super().state_dict().keys()
        super().load_state_dict({key: value for key, value in state_dict.items() if key in known})
        groups = self.optimizer.param_groups
        for group, saved in zip(groups, state_dict["param_groups"], strict=True):
            for key in self._group_keys(self.optimizer):
                if key in saved:
                    set_hyperparameter(group, key, saved[key], like=group["lr"])
                else:  # of a group that was added since the last step
                    group.pop(key, None)
        for name in ("base_lrs", "_last_lr"):
            values = [_like(value, group["lr"]) for value, group in zip(state_dict[name], groups, strict=False)]
            setattr(self, name, values)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Return if `load_state_dict` can take a state.

        Raises:
            ConfigError: It is of another class, of other settings, or of an optimizer with other param groups.
        """
        name = type(self).__name__
        wanted = (*self.SETTINGS, "last_epoch", "base_lrs", "_last_lr", "param_groups")
        missing = [key for key in wanted if key not in state_dict]
        if missing:
            raise ConfigError(
                f"the state has no {missing[0]!r}, so it is not of booster.lr_scheduler.{name}: load what state_dict()"
                f" of this class returned, or load the optimizer alone and build {name}(optimizer, total_steps, ...,"
                " last_epoch=steps_taken - 1)"
            )
        if not isinstance(state_dict["last_epoch"], int):
            raise ConfigError(
                f"the state has last_epoch={state_dict['last_epoch']!r:.80}, which is no number of steps: load what"
                " state_dict() returned"
            )
        self._check_settings(state_dict)
        groups, num_groups = state_dict["param_groups"], len(self.optimizer.param_groups)
        if len(groups) != num_groups or max(len(state_dict[key]) for key in ("base_lrs", "_last_lr")) > num_groups:
            raise ConfigError(
                f"the state is of an optimizer with {len(groups)} param groups, and this one has {num_groups}: build"
                " the optimizer with the groups that it was saved with"
            )
        own = [key for key in self._group_keys(self.optimizer) if key in self.optimizer.defaults]
        missing = [key for key in own for group in groups if key not in group]
        if missing:
            raise ConfigError(
                f"the state has no {missing[0]!r} of a param group, and this is a schedule of the {missing[0]} of"
                f" {type(self.optimizer).__name__}: build the kind of optimizer that it was saved with"
            )

    def _check_settings(self, state_dict: Mapping[str, Any]) -> None:
        changed = [key for key in self.SETTINGS if state_dict[key] != getattr(self, key)]
        if changed:
            saved = ", ".join(f"{key}={_shown(state_dict[key])}" for key in changed)
            given = ", ".join(f"{key}={_shown(getattr(self, key))}" for key in changed)
            raise ConfigError(
                f"the state is of a {type(self).__name__} with {saved}, and this one has {given}, so it is no longer"
                f" the same schedule: build it with {saved} to go on exactly; for another schedule load the optimizer"
                f" alone and build this one with last_epoch={state_dict['last_epoch'] - 1}"
            )


class CurveSchedule(Schedule):
    """A schedule that torch does not have: the curve is all there is."""

    def get_lr(self) -> list[LearningRate]:
        """Return the learning rates of all groups for `step`; users call `get_last_lr`."""
        return self._get_closed_form_lr()


def copied(value: Any) -> Any:
    """Return a hyperparameter that shares no memory with the given one."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def set_hyperparameter(group: dict[str, Any], key: str, value: Any, like: Any = None) -> None:
    """Set a hyperparameter of a group; a tensor stays the same tensor, as compiled steps hold on to it.

    Args:
        group: The group.
        key: The hyperparameter's name.
        value: A number, or a tensor with one.
        like: Where the group does not have it yet: tells whether it becomes a tensor.
    """
    current = group.get(key, like)
    if isinstance(group.get(key), Tensor):
        group[key].fill_(float(value))
    else:
        group[key] = _like(value, current)


def _like(value: Any, other: Any) -> Any:
    """Return a hyperparameter as a number or as a tensor, whichever another one is."""
    if isinstance(other, Tensor):
        return torch.as_tensor(value, dtype=other.dtype, device=other.device).detach().clone()
    return value.item() if isinstance(value, Tensor) else value


def _shown(value: Any) -> str:
    listed = sorted(value.elements()) if hasattr(value, "elements") else value
    return repr(listed)[:80]
