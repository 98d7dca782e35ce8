"""Adafactor: Adam without the memory that its second moments take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigError
from booster.optim.factored_base import FactoredBase
from booster.optim.factored_squares import num_sums
from booster.optim.hyperparameters import require_amount, require_flag, require_fractions, require_learning_rate
from booster.optim.whole_parameters import ParameterStep, StepBatch

__all__ = ["Adafactor"]


class Adafactor(FactoredBase):
    """Adafactor (Shazeer and Stern, "Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018, Algorithms 4, 5).

    As in fairseq, transformers and ColossalAI, whose arguments these are: rows and columns have means where the paper
    has sums, which estimate the same; with `beta1` the first moment is one of clipped updates, each already times its
    rate; weights decay by `weight_decay` times the rate. torch.optim.Adafactor takes `lr` for the paper's upper limit
    of the relative step, and has no momentum.

    Bytes per element: none but of vectors, 4 with `beta1`; 4 per row and column. Over shards two all-reduces: of a
    number per row, column and parameter, and of one per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate, with `relative_step=False`; None: the relative step.
        eps: Added to squared gradients; and the least that a parameter's root mean square counts. Positive.
        clip_threshold: What the root mean square of an update is clipped to.
        decay_rate: The squares of step t keep `1 - t ** decay_rate` of what they were.
        beta1: Decay rate of the first moment; None: there is none.
        weight_decay: Weight decay.
        scale_parameter: Multiply the rate by the root mean square of the parameter.
        relative_step: Have a rate of `min(0.01, 1 / sqrt(t))`.
        warmup_init: Have one of `min(1e-6 * t, 1 / sqrt(t))`.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
    """

    _moments = ("exp_avg", "exp_avg_sq")
    _averages = ("exp_avg_sq",)
    _usual_eps = (1e-30, 1e-3)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        for name in ("scale_parameter", "relative_step", "warmup_init"):
            require_flag(group, name)
        _check_rate(group)
        self._check_small_pair(group)
        require_amount(group, "clip_threshold", is_positive=True, why="would clip every update to nothing")
        rate = group["decay_rate"]
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not -1.0 <= rate < 0.0:
            raise ConfigError(
                f"decay_rate={rate!r} makes no decay of 1 - t ** decay_rate that begins at 0 and grows to 1: give a"
                " number from -1 up to 0, such as -0.8"
            )
        if group["beta1"] is not None:
            require_fractions({"beta1": (group["beta1"],)}, "beta1", 1, example=(0.9,))
        require_amount(group, "weight_decay")

    def _update(self, steps: list[ParameterStep]) -> None:
        for batch in StepBatch.divide(steps, self._shards):
            scales = self._take_gradients(batch)
            updates = [self._divided(step, "exp_avg_sq", step.gradient) for step in batch.steps]
            self._clip(batch, updates)
            for step, update, scale in zip(batch.steps, updates, scales, strict=True):
                self._apply(step, update, scale)

    def _take_gradients(self, batch: StepBatch) -> list[Tensor]:
        """Takes the gradients into their averages; returns the weights' root mean squares. Collective."""
        own = [
            torch.cat([self._sums_of_squares(step, step.gradient), step.sum_of_squares(step.weights).reshape(1)])
            for step in batch.steps
        ]
        totals = batch.sums(own, lambda shape: num_sums(shape) + 1)
        for step, total in zip(batch.steps, totals, strict=True):
            number = step.state["step"] = step.state.get("step", 0) + 1
            decay = 1.0 - number ** step.group["decay_rate"]
            eps = step.group["eps"][0]
            self._take_squares(step, "exp_avg_sq", total[:-1], step.gradient, decay=decay, eps=eps)
        return [(total[-1] / step.numel).sqrt() for step, total in zip(batch.steps, totals, strict=True)]

    def _apply(self, step: ParameterStep, update: Tensor, scale: Tensor) -> None:
        group = step.group
        rate: Tensor | float = _rate(group, step.state["step"])
        if group["scale_parameter"]:
            rate = scale.clamp(min=group["eps"][1]) * rate
        update.mul_(rate)
        if group["beta1"] is not None:
            update = self._state_tensor(step, "exp_avg").mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"]:
            step.weights.mul_(1 - group["weight_decay"] * rate)
        step.weights.sub_(update)


def _rate(group: Mapping[str, Any], number: int) -> float:
    if not group["relative_step"]:
        return float(group["lr"])
    return min(1e-6 * number if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(number))


def _check_rate(group: Mapping[str, Any]) -> None:
    if group["relative_step"] and group["lr"] is not None:
        raise ConfigError(
            f"lr={group['lr']!r} would not be used, as relative_step=True finds the rate from the number of steps: pass"
            " relative_step=False as well (and scale_parameter=False for a rate that does not depend on the weights),"
            " or leave lr out"
        )
    if not group["relative_step"]:
        require_learning_rate(group)
    if group["warmup_init"] and not group["relative_step"]:
        raise ConfigError(
            "warmup_init=True warms a relative step up, and relative_step=False has none: leave warmup_init out, and"
            " warm lr up by booster.lr_scheduler.LinearWarmupLR"
        )
