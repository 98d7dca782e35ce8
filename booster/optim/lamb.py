"""LAMB: Adam whose update of every layer is as long as the layer's weights are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from booster.optim.base import OptimizerBase
from booster.optim.hyperparameters import require_amount, require_flag, require_fractions, require_learning_rate
from booster.optim.trust_ratio import norms_of_pairs, ratio_of_norms
from booster.optim.whole_parameters import ParameterStep, StepBatch

__all__ = ["Lamb"]


class Lamb(OptimizerBase):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, Algorithm 2), phi(z) = z.

    Moments are corrected for their start at zero, as in the paper; cybertronai's and ColossalAI's `Lamb` leave that
    out: `FusedLAMB(bias_correction=False, max_grad_norm=0)` computes theirs. A layer whose weights or whose update are
    all zero has a ratio of 1.

    Bytes per element: 8 for the moments. Over shards one all-reduce of two numbers per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator; positive.
        weight_decay: Part of the update, and of its norm.
        adam: Have a ratio of 1 everywhere, which is AdamW.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
    """

    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam": adam})

    def _check_group(self, group: Mapping[str, Any]) -> None:
        require_learning_rate(group)
        require_fractions(group, "betas", 2, example=(0.9, 0.999))
        require_amount(group, "eps", is_positive=True, why="divides 0 by 0 where an element never had a gradient")
        require_amount(group, "weight_decay")
        require_flag(group, "adam")

    def _update(self, steps: list[ParameterStep]) -> None:
        for batch in StepBatch.divide(steps, self._shards):
            updates = [self._adam_update(step) for step in batch.steps]
            norms = norms_of_pairs(batch, updates)
            for step, update, pair in zip(batch.steps, updates, norms, strict=True):
                if not step.group["adam"]:
                    update.mul_(ratio_of_norms(*pair))
                step.weights.sub_(update, alpha=float(step.group["lr"]))

    def _adam_update(self, step: ParameterStep) -> Tensor:
        (beta1, beta2), state = step.group["betas"], step.state
        first, second = self._state_tensor(step, "exp_avg"), self._state_tensor(step, "exp_avg_sq")
        number = state["step"] = state.get("step", 0) + 1
        first.lerp_(step.gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(step.gradient, step.gradient, value=1 - beta2)
        denominator = (second / (1 - beta2**number)).sqrt_().add_(step.group["eps"])
        update = first.div(denominator).div_(1 - beta1**number)
        return update.add_(step.weights, alpha=step.group["weight_decay"])
