"""LARS: SGD whose step in every layer is a fraction of the layer's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from booster.optim.base import OptimizerBase
from booster.optim.hyperparameters import require_amount, require_learning_rate
from booster.optim.trust_ratio import norms_of_pairs
from booster.optim.whole_parameters import ParameterStep, StepBatch

__all__ = ["Lars"]


class Lars(OptimizerBase):
    """LARS (You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017, Algorithm 1).

    A layer's rate is `lr * eeta * |w| / (|g| + weight_decay * |w| + eps)`, and is part of what momentum remembers, as
    in the paper. A layer whose weights or gradients are all zero has the plain `lr`. ColossalAI's `Lars` does not let
    the ratio grow over 50; torchlars and apex's LARC decay the weights as here, but apex applies momentum before `lr`.

    Bytes per element: 4 with momentum. Over shards one all-reduce of two numbers per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate of all layers together.
        momentum: What remains of the last update; less than 1.
        eeta: How much of a layer's weights an update may be; the paper's eta.
        weight_decay: Added to the gradient, times the weights.
        eps: Added to the denominator of the ratio.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
    """

    _moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        eps: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "eeta": eeta, "weight_decay": weight_decay, "eps": eps}
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        require_learning_rate(group)
        require_amount(group, "momentum", below=1.0)
        require_amount(group, "eeta", is_positive=True, why="would leave no step of any length")
        require_amount(group, "weight_decay")
        require_amount(group, "eps")

    def _update(self, steps: list[ParameterStep]) -> None:
        for batch in StepBatch.divide(steps, self._shards):
            norms = norms_of_pairs(batch, [step.gradient for step in batch.steps])
            for step, (weight_norm, gradient_norm) in zip(batch.steps, norms, strict=True):
                self._update_one(step, _ratio(step.group, weight_norm, gradient_norm))

    def _update_one(self, step: ParameterStep, ratio: Tensor) -> None:
        group = step.group
        update = step.gradient.add(step.weights, alpha=group["weight_decay"]).mul_(ratio * float(group["lr"]))
        if group["momentum"]:
            update = self._state_tensor(step, "momentum_buffer").mul_(group["momentum"]).add_(update)
        step.weights.sub_(update)


def _ratio(group: Mapping[str, Any], weight_norm: Tensor, gradient_norm: Tensor) -> Tensor:
    denominator = gradient_norm + group["weight_decay"] * weight_norm + group["eps"]
    is_usual = (weight_norm > 0) & (gradient_norm > 0)
    return torch.where(is_usual, group["eeta"] * weight_norm / denominator, torch.ones_like(weight_norm))
