"""CAME: Adafactor that trusts its updates as far as they agree with those before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from booster.optim.factored_base import FactoredBase
from booster.optim.factored_squares import num_sums
from booster.optim.hyperparameters import require_amount, require_fractions, require_learning_rate
from booster.optim.whole_parameters import ParameterStep, StepBatch

__all__ = ["CAME"]


class CAME(FactoredBase):
    """CAME (Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", ACL 2023, Algorithm 2).

    As in the authors' code and ColossalAI's, rows and columns have means where the paper has sums; weights decay by
    `lr * weight_decay` before the update; and parameters of fewer than two dimensions, for which the paper has no
    confidence, are updated by their first moment.

    Bytes per element: 4 for the first moment; 8 per row and column. Over shards three all-reduces: two of a number per
    row and column, and one of a number per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate; has to be given, here or in every group.
        eps: Added to squared gradients, and to squared differences of update and first moment. Positive.
        clip_threshold: What the root mean square of an update is clipped to.
        betas: Decay rates of the first moment, of squared gradients and of squared differences.
        weight_decay: Weight decay.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
    """

    _moments = ("exp_avg", "exp_avg_sq", "exp_avg_res")
    _averages = ("exp_avg_sq", "exp_avg_res")
    _usual_eps = (1e-30, 1e-16)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        if "params" in group or group["lr"] is not None:  # every group may have its own
            require_learning_rate(group)
        self._check_small_pair(group)
        require_amount(group, "clip_threshold", is_positive=True, why="would clip every update to nothing")
        require_fractions(group, "betas", 3, example=(0.9, 0.999, 0.9999))
        require_amount(group, "weight_decay")

    def _update(self, steps: list[ParameterStep]) -> None:
        for batch in StepBatch.divide(steps, self._shards):
            sums = batch.sums([self._sums_of_squares(step, step.gradient) for step in batch.steps], num_sums)
            for step, total in zip(batch.steps, sums, strict=True):
                step.state["step"] = step.state.get("step", 0) + 1
                self._take(step, "exp_avg_sq", total, step.gradient, number=0)
            updates = [self._divided(step, "exp_avg_sq", step.gradient) for step in batch.steps]
            self._clip(batch, updates)
            differences = [self._take_update(step, update) for step, update in zip(batch.steps, updates, strict=True)]
            del updates
            pairs = list(zip(batch.steps, differences, strict=True))
            sums = batch.sums([self._sums_of_squares(step, difference) for step, difference in pairs], num_sums)
            for (step, difference), total in zip(pairs, sums, strict=True):
                self._apply(step, difference, total)

    def _take(self, step: ParameterStep, average: str, sums: Tensor, tensor: Tensor, *, number: int) -> None:
        decay, eps = step.group["betas"][number + 1], step.group["eps"][number]
        self._take_squares(step, average, sums, tensor, decay=decay, eps=eps)

    def _take_update(self, step: ParameterStep, update: Tensor) -> Tensor:
        """Takes an update into the first moment; returns by how much they differ, in its place."""
        beta1 = step.group["betas"][0]
        first = self._state_tensor(step, "exp_avg").mul_(beta1).add_(update, alpha=1 - beta1)
        return update.sub_(first)

    def _apply(self, step: ParameterStep, difference: Tensor, sums: Tensor) -> None:
        lr, update = float(step.group["lr"]), self._state_tensor(step, "exp_avg")
        if len(step.shape) >= 2:
            self._take(step, "exp_avg_res", sums, difference, number=1)
            update = self._divided(step, "exp_avg_res", update)
        step.weights.mul_(1 - lr * step.group["weight_decay"])
        step.weights.sub_(update, alpha=lr)
