"""Learning rate schedules that are defined by functions of the step."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from booster.errors import ConfigError

from .base import LearningRate, Schedule, check_total_steps

Function = Callable[[int], float]
Functions = Function | Sequence[Function]


class FunctionSchedule(Schedule):
    """Schedule defined by one function of the step per param group.

    As in torch, the state has the attributes of callable objects, but not of functions: build the scheduler with the
    same functions to resume.
    """

    lr_lambdas: list[Function]

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Functions | None = None, last_epoch: int = -1
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self._check(optimizer, last_epoch)
        functions: Any = _functions(lr_lambda, optimizer, type(self).__name__)
        super().__init__(optimizer, functions, last_epoch)  # type: ignore[call-arg]  # of torch's class beside this one

    def _add_group(self, group: dict[str, Any], index: int) -> None:
        if len(self.lr_lambdas) <= index:
            if any(function is not self.lr_lambdas[0] for function in self.lr_lambdas):
                raise ConfigError(
                    f"param group {index} was added to the optimizer, but lr_lambda has one function for each of the"
                    f" first {len(self.lr_lambdas)} groups: build another scheduler with {index + 1} functions, or one"
                    " function for all"
                )
            self.lr_lambdas.append(self.lr_lambdas[0])
        super()._add_group(group, index)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that `load_state_dict` accepts a state.

        Raises:
            ConfigError: See `Schedule.check_state_dict`, or a function replaces a callable object with saved state.
        """
        super().check_state_dict(state_dict)
        saved = state_dict.get("lr_lambdas", [])
        if len(saved) > len(self.lr_lambdas):
            raise ConfigError(
                f"the state has {len(saved)} functions, but this {type(self).__name__} has {len(self.lr_lambdas)}:"
                " build it with as many, in the same order"
            )
        for index, attributes in enumerate(saved):
            if attributes and isinstance(self.lr_lambdas[index], types.FunctionType):
                raise ConfigError(
                    f"the state of lr_lambda {index} has {', '.join(map(repr, attributes))}, which a function can't"
                    " load: build the scheduler with an object of the saved class"
                )


class LambdaLR(FunctionSchedule, lr_scheduler.LambdaLR):
    """torch's LambdaLR: the learning rate multiplied by a function of the step.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, after which the learning rate is constant.
        lr_lambda: Function of the number of steps taken, or one per param group.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    def _get_closed_form_lr(self) -> list[LearningRate]:
        step = min(self.last_epoch, self.total_steps)
        return [base_lr * function(step) for base_lr, function in zip(self.base_lrs, self.lr_lambdas, strict=False)]


class MultiplicativeLR(FunctionSchedule, lr_scheduler.MultiplicativeLR):
    """torch's MultiplicativeLR: the previous learning rate multiplied by a function of the step.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, after which the learning rate is constant.
        lr_lambda: Function of the number of steps taken, from 1, or one per param group.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    def _get_closed_form_lr(self) -> list[LearningRate]:
        steps = range(1, min(self.last_epoch, self.total_steps) + 1)
        return [
            math.prod(map(function, steps), start=base_lr)
            for base_lr, function in zip(self.base_lrs, self.lr_lambdas, strict=False)
        ]


def _functions(lr_lambda: Any, optimizer: Optimizer, scheduler: str) -> list[Function]:
    """Return one function per param group; raise `ConfigError` if they can't be called or saved, or are not as many."""
    num_groups = len(optimizer.param_groups)
    functions = list(lr_lambda) if isinstance(lr_lambda, (list, tuple)) else [lr_lambda] * num_groups
    if len(functions) != num_groups:
        raise ConfigError(
            f"lr_lambda has {len(functions)} functions, but the optimizer has {num_groups} param groups: give one for"
            " each, or one function for all"
        )
    for function in functions:
        if not callable(function):
            raise ConfigError(
                f"lr_lambda={function!r} is not callable, and {scheduler} calls it at each step: give a function, such"
                " as lr_lambda=lambda step: 0.95**step"
            )
        if not hasattr(function, "__dict__"):
            raise ConfigError(
                f"lr_lambda={function!r} has no __dict__, so its state can't be saved: wrap it, as in lr_lambda=lambda"
                " step: ..."
            )
    return functions
