"""Learning rate schedules: those of torch, and variants with warmup, with a fixed total number of steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, Literal

from torch.optim import Optimizer, lr_scheduler

from booster.errors import ConfigError

from .base import (
    CurveSchedule,
    LearningRate,
    Schedule,
    check_fraction,
    check_learning_rate,
    check_milestones,
    check_number,
    check_optimizer,
    check_steps,
    check_total_steps,
    check_warmup_steps,
    copy_hyperparameter,
    cosine_annealing,
    polynomial_decay,
)


class CosineAnnealingLR(Schedule, lr_scheduler.CosineAnnealingLR):
    """Cosine annealing to `eta_min`: torch's CosineAnnealingLR with `T_max=total_steps`, constant afterwards.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, without restarts.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        eta_min: Final learning rate.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "eta_min")
    _FINAL_LR = "eta_min"

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.eta_min = check_number("eta_min", eta_min)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, self.total_steps, self.eta_min, last_epoch)


class CosineAnnealingWarmupLR(CurveSchedule):
    """Linear warmup to the learning rate, then cosine annealing to `eta_min` over the remaining steps.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate; the step after warmup also has all of it.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        eta_min: Final learning rate.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "warmup_steps", "eta_min")
    _FINAL_LR = "eta_min"

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self.eta_min = check_number("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def _after_warmup(self, base_lr: LearningRate, step: int, num_steps: int) -> LearningRate:
        return cosine_annealing(base_lr, step, num_steps, self.eta_min)


class StepLR(Schedule, lr_scheduler.StepLR):
    """torch's StepLR: the learning rate multiplied by `gamma` every `step_size` steps.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, after which the learning rate is constant; not `step_size`.
        step_size: Number of steps between two decays.
        gamma: Decay factor.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    SETTINGS = ("total_steps", "step_size", "gamma")

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.step_size = check_steps("step_size", step_size, 1)
        self.gamma = check_number("gamma", gamma, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, self.step_size, self.gamma, last_epoch)


class ExponentialLR(Schedule, lr_scheduler.ExponentialLR):
    """torch's ExponentialLR: the learning rate multiplied by `gamma` every step.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, after which the learning rate is constant.
        gamma: Decay factor.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    SETTINGS = ("total_steps", "gamma")

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.gamma = check_number("gamma", gamma, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, self.gamma, last_epoch)


class FlatAnnealingWarmupLR(CurveSchedule):
    """Linear warmup, constant learning rate, then cosine annealing to `eta_min` over the remaining steps.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        pct_start: Fraction of the steps after warmup with a constant learning rate, rounded down to a step.
        eta_min: Final learning rate.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "warmup_steps", "pct_start", "eta_min")
    _FINAL_LR = "eta_min"

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self.pct_start = check_fraction("pct_start", pct_start, is_one_allowed=False)
        self.eta_min = check_number("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def _after_warmup(self, base_lr: LearningRate, step: int, num_steps: int) -> LearningRate:
        num_flat = int(num_steps * self.pct_start)
        return cosine_annealing(base_lr, max(0, step - num_flat), num_steps - num_flat, self.eta_min)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """Constant learning rate, then cosine annealing to 0 over the remaining steps.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        pct_start: Fraction of the steps with a constant learning rate, rounded down to a step.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)


class LinearWarmupLR(CurveSchedule):
    """Linear warmup to the learning rate, then linear decay to 0 over the remaining steps.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate, as in all schedulers of this package; the step after
    warmup also has all of it.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid.
    """

    SETTINGS = ("total_steps", "warmup_steps")

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        super().__init__(optimizer, last_epoch)

    def _after_warmup(self, base_lr: LearningRate, step: int, num_steps: int) -> LearningRate:
        return polynomial_decay(base_lr, step, num_steps, 0.0, 1.0)


class MultiStepLR(Schedule, lr_scheduler.MultiStepLR):
    """torch's MultiStepLR: the learning rate multiplied by `gamma` at each milestone.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        milestones: Steps in ascending order, at least one; a repeated step counts twice.
        gamma: Decay factor.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a milestone is out of range.
    """

    SETTINGS = ("total_steps", "milestones", "gamma")

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Iterable[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        steps = check_milestones(milestones, self.total_steps)
        self.gamma = check_number("gamma", gamma, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, steps, self.gamma, last_epoch)


class MultiStepWarmupLR(CurveSchedule):
    """Linear warmup to the learning rate, which is then multiplied by `gamma` at each milestone.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        milestones: Steps in ascending order, counted from the start of the run; at least one, none within warmup. A
            repeated step counts twice.
        gamma: Decay factor.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a milestone is out of range or within warmup.
    """

    SETTINGS = ("total_steps", "warmup_steps", "milestones", "gamma")

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Iterable[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self.milestones = check_milestones(milestones, self.total_steps, self.warmup_steps)
        self.gamma = check_number("gamma", gamma, is_minimum_allowed=False)
        super().__init__(optimizer, last_epoch)

    def _after_warmup(self, base_lr: LearningRate, step: int, num_steps: int) -> LearningRate:
        return base_lr * self.gamma ** bisect_right(self.milestones, step + self.warmup_steps)


class OneCycleLR(Schedule, lr_scheduler.OneCycleLR):
    """torch's OneCycleLR with the optimizer's learning rates as `max_lr`.

    Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates", 2018. The
    last of the `total_steps` steps and all later ones have the smallest learning rate, where torch's class raises.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        pct_start: Fraction of the steps in which the learning rate increases.
        anneal_strategy: "cos" or "linear".
        cycle_momentum: If True, the momentum or the first of `betas` decreases while the learning rate increases.
        base_momentum: Smallest momentum, at the largest learning rate.
        max_momentum: Largest momentum, at both ends of the cycle.
        div_factor: Ratio of the largest to the initial learning rate.
        final_div_factor: Ratio of the initial to the final learning rate.
        last_epoch: Index of the last step when resuming, with the groups of a saved optimizer; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or the optimizer has no momentum to cycle.
    """

    SETTINGS = (
        "total_steps",
        "pct_start",
        "anneal_strategy",
        "cycle_momentum",
        "base_momentum",
        "max_momentum",
        "div_factor",
        "final_div_factor",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.pct_start = check_fraction("pct_start", pct_start, is_one_allowed=True)
        self.anneal_strategy = anneal_strategy
        self.cycle_momentum = bool(cycle_momentum)
        self.base_momentum = check_number("base_momentum", base_momentum)
        self.max_momentum = check_number("max_momentum", max_momentum)
        self.div_factor = check_number("div_factor", div_factor, is_minimum_allowed=False)
        self.final_div_factor = check_number("final_div_factor", final_div_factor, is_minimum_allowed=False)
        self._check_cycle(optimizer)
        self._check(optimizer, last_epoch)
        super().__init__(
            optimizer,
            [self._max_lr(group) for group in optimizer.param_groups],
            total_steps=self.total_steps,
            pct_start=self.pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=self.cycle_momentum,
            base_momentum=self.base_momentum,
            max_momentum=self.max_momentum,
            div_factor=self.div_factor,
            final_div_factor=self.final_div_factor,
            last_epoch=last_epoch,
        )

    def _check_cycle(self, optimizer: Optimizer) -> None:
        check_optimizer(optimizer, "OneCycleLR")
        if self.anneal_strategy not in ("cos", "linear"):
            raise ConfigError(f"anneal_strategy={self.anneal_strategy!r} is unknown: give 'cos' or 'linear'")
        if self.pct_start * self.total_steps == 1:
            raise ConfigError(
                f"pct_start={self.pct_start} of total_steps={self.total_steps} is one step, in which the learning rate"
                " can't increase from its initial value to its largest: give a larger pct_start, or 0 for no increase"
            )
        if self.cycle_momentum and not max(self.base_momentum, self.max_momentum) < 1:
            raise ConfigError(
                f"base_momentum={self.base_momentum} and max_momentum={self.max_momentum} must be less than 1: give the"
                " defaults 0.85 and 0.95, or others below 1"
            )
        if self.cycle_momentum and not {"momentum", "betas"} & optimizer.defaults.keys():
            raise ConfigError(
                f"{type(optimizer).__name__} has neither momentum nor betas to cycle: give cycle_momentum=False"
            )

    def _check_learning_rate(self, group: dict[str, Any], index: int) -> None:
        check_learning_rate(self._max_lr(group), index)

    def _max_lr(self, group: dict[str, Any]) -> Any:
        """Return the peak learning rate: that of an earlier cycle, the base of another schedule, or `lr`."""
        return group.get("max_lr", group.get("initial_lr", group["lr"]))

    def _group_keys(self, optimizer: Optimizer) -> tuple[str, ...]:
        keys = ("lr", "initial_lr", "max_lr", "min_lr")
        if not self.cycle_momentum:
            return keys
        return (*keys, "max_momentum", "base_momentum", "betas" if "betas" in optimizer.defaults else "momentum")

    def get_lr(self) -> list[LearningRate]:
        """Set the momentum and return the learning rates of all groups; internal to `step`."""
        taken = self.last_epoch
        self.last_epoch = min(taken, self.total_steps - 1)  # torch's curve increases again after the last step
        try:
            return lr_scheduler.OneCycleLR.get_lr(self)
        finally:
            self.last_epoch = taken

    def _get_closed_form_lr(self) -> list[LearningRate]:
        return self.get_lr()

    def _add_group(self, group: dict[str, Any], index: int) -> None:
        self._check_learning_rate(group, index)
        group["max_lr"] = copy_hyperparameter(self._max_lr(group))
        group["initial_lr"] = group["max_lr"] / self.div_factor
        group["min_lr"] = group["initial_lr"] / self.final_div_factor
        if self.cycle_momentum:
            group["max_momentum"], group["base_momentum"] = self.max_momentum, self.base_momentum
        self.base_lrs.append(copy_hyperparameter(group["initial_lr"]))


class PolynomialLR(Schedule, lr_scheduler.PolynomialLR):
    """Polynomial decay to `end_lr`; torch's PolynomialLR if `end_lr=0`.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps.
        end_lr: Final learning rate.
        power: Exponent; 1 is linear, and a larger one decays faster at first.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "end_lr", "power")
    _FINAL_LR = "end_lr"

    def __init__(
        self, optimizer: Optimizer, total_steps: int, end_lr: float = 1e-4, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.end_lr = check_number("end_lr", end_lr)
        self.power = check_number("power", power, is_minimum_allowed=False)
        self._check(optimizer, last_epoch)
        super().__init__(optimizer, self.total_steps, self.power, last_epoch)

    def get_lr(self) -> list[LearningRate]:
        """Return the learning rates of all groups; internal to `step`, users call `get_last_lr`."""
        if self.end_lr == 0 or self._step_count == 1 or self.last_epoch > self.total_steps:
            return super().get_lr()
        # torch's recursion decays to 0: it is applied to the part above `end_lr`.
        left, left_before = (1.0 - step / self.total_steps for step in (self.last_epoch, self.last_epoch - 1))
        factor = (left / left_before) ** self.power
        return [(group["lr"] - self.end_lr) * factor + self.end_lr for group in self.optimizer.param_groups]

    def _get_closed_form_lr(self) -> list[LearningRate]:
        step = min(self.last_epoch, self.total_steps)
        return [polynomial_decay(one, step, self.total_steps, self.end_lr, self.power) for one in self.base_lrs]


class PolynomialWarmupLR(CurveSchedule):
    """Linear warmup to the learning rate, then polynomial decay to `end_lr`.

    Warmup steps have 1/n, 2/n, ..., n/n of the learning rate; the step after warmup also has all of it.

    Args:
        optimizer: Optimizer, boosted or not.
        total_steps: Total number of training steps, including warmup.
        warmup_steps: Number of warmup steps.
        end_lr: Final learning rate.
        power: Exponent; 1 is linear, and a larger one decays faster at first.
        last_epoch: Index of the last step when resuming, with groups that have `initial_lr`; -1 to start.

    Raises:
        ConfigError: An argument is invalid, or a group's learning rate is below the final one.
    """

    SETTINGS = ("total_steps", "warmup_steps", "end_lr", "power")
    _FINAL_LR = "end_lr"

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, self.total_steps)
        self.end_lr = check_number("end_lr", end_lr)
        self.power = check_number("power", power, is_minimum_allowed=False)
        super().__init__(optimizer, last_epoch)

    def _after_warmup(self, base_lr: LearningRate, step: int, num_steps: int) -> LearningRate:
        return polynomial_decay(base_lr, step, num_steps, self.end_lr, self.power)
