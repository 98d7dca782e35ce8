"""One-cycle policy of learning rate and momentum."""

from __future__ import annotations

from typing import Any, Literal

from torch.optim import Optimizer, lr_scheduler

from booster.errors import ConfigError
from booster.lr_scheduler.checks import (
    check_fraction,
    check_learning_rate,
    check_number,
    check_optimizer,
    check_total_steps,
)
from booster.lr_scheduler.curves import LearningRate
from booster.lr_scheduler.schedule import Schedule, copy_hyperparameter

__all__ = ["OneCycleLR"]


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
