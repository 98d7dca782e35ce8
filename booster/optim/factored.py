"""Adafactor and CAME: adaptive optimizers with factored second moments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from booster.errors import ConfigError
from booster.validation import is_non_nan_number

from .base import OptimizerBase, check_decay_rates, check_flags, check_learning_rate, check_non_negative
from .param_update import ParamUpdate, UpdateBatch

# Note [Factored second moments]
# Shazeer and Stern (2018, section 3): with means of squares R over the rows and C over the columns of a matrix, the
# estimate of an element's mean square is R_i * C_j / mean(R). With more than two dimensions the last two form matrices.
# A matrix of a single row or column is not factored, as its factors would hold the same values. Factored states have
# the shapes of torch.mean(keepdim=True), so that none can be mistaken for a state with a value per element.


def is_factored(shape: Sequence[int]) -> bool:
    """Return whether second moments of a parameter of this shape are factored."""
    return len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1


def num_row_and_column_sums(shape: Sequence[int]) -> int:
    """Return the number of row and column sums of a parameter, 0 if it is not factored."""
    if not is_factored(shape):
        return 0
    return sum(torch.Size(part).numel() for part in row_and_column_shapes(shape))


def row_and_column_shapes(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the row and column states of a factored parameter."""
    return (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])


def _row_and_column_slices(box: Sequence[tuple[int, int]]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the indices of a block in the row and column states."""
    *matrices, rows, columns = (slice(offset, offset + length) for offset, length in box)
    return (*matrices, rows, slice(None)), (*matrices, slice(None), columns)


class FactoredBase(OptimizerBase):
    """Optimizer with factored second moments; see Note [Factored second moments]."""

    _second_moments: ClassVar[tuple[str, ...]] = ()
    """Keys of the second moments; a factored one has two states, with the suffixes _row and _col."""

    _default_eps: ClassVar[tuple[float, float]]

    def _check_eps(self, group: Mapping[str, Any]) -> None:
        pair = group["eps"]
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(one, float) and 0 < one < float("inf") for one in pair):
            raise ConfigError(
                f"eps={pair!r} is not the pair of small numbers that keep divisors and rates above zero: give two"
                f" positive floats, such as {self._default_eps}"
            )

    def _state_shape(self, parameter: Tensor, key: str) -> tuple[int, ...] | None:
        average, _, side = key.rpartition("_")
        if average not in self._second_moments or side not in ("row", "col"):
            return super()._state_shape(parameter, key)
        shard = None if self._shards is None else self._shards.shard_of(parameter)
        shape = tuple(parameter.shape) if shard is None else shard.global_shape
        if not is_factored(shape):
            return None
        return row_and_column_shapes(shape)[0 if side == "row" else 1]

    def _sums_of_squares(self, step: ParamUpdate, tensor: Tensor) -> Tensor:
        """Return this rank's addends to the sums of squares over rows and over columns; empty if not factored."""
        if not is_factored(step.shape):
            return tensor.new_zeros(0)
        rows, columns = (tensor.new_zeros(shape) for shape in row_and_column_shapes(step.shape))
        for block in step.blocks(tensor):
            if block.is_owned:
                squares = block.view.square()
                of_rows, of_columns = _row_and_column_slices(block.box)
                rows[of_rows] += squares.sum(dim=-1, keepdim=True)
                columns[of_columns] += squares.sum(dim=-2, keepdim=True)
        return torch.cat([rows.flatten(), columns.flatten()])

    def _update_factored_second_moment(
        self, step: ParamUpdate, moment: str, sums: Tensor, tensor: Tensor, *, decay: float, eps: float
    ) -> None:
        """Update a second moment with the squares of a shard's tensor; `sums` are those of the full parameter."""
        if not is_factored(step.shape):
            squares = self._state_tensor(step, moment)
            squares.mul_(decay).addcmul_(tensor, tensor, value=1.0 - decay).add_(eps * (1.0 - decay))
            return
        row_shape, column_shape = row_and_column_shapes(step.shape)
        rows, columns = sums.split([math.prod(row_shape), math.prod(column_shape)])
        *_, num_rows, num_columns = step.shape
        pairs = (("row", rows.view(row_shape) / num_columns), ("col", columns.view(column_shape) / num_rows))
        for key, means in pairs:
            self._state_tensor(step, f"{moment}_{key}").mul_(decay).add_(means + eps, alpha=1.0 - decay)

    def _preconditioned(self, step: ParamUpdate, moment: str, tensor: Tensor) -> Tensor:
        """Return a new tensor: `tensor` divided by the root of a second moment. Padding is zero."""
        if not is_factored(step.shape):
            return tensor * self._state_tensor(step, moment).rsqrt()
        rows, columns = (self._state_tensor(step, f"{moment}_{key}") for key in ("row", "col"))
        row_factors = (rows / rows.mean(dim=-2, keepdim=True)).rsqrt()
        column_factors = columns.rsqrt()
        result = torch.zeros_like(tensor)
        for source, target in zip(step.blocks(tensor), step.blocks(result), strict=True):
            of_rows, of_columns = _row_and_column_slices(source.box)
            torch.mul(source.view, row_factors[of_rows], out=target.view)
            target.view.mul_(column_factors[of_columns])
        return result

    def _clip(self, batch: UpdateBatch, updates: Sequence[Tensor]) -> None:
        """Scale updates in place so that their root mean squares meet the threshold. Collective, one all-reduce."""
        squares = [step.sum_of_squares(one).reshape(1) for step, one in zip(batch.updates, updates, strict=True)]
        for step, update, total in zip(
            batch.updates, updates, batch.reduced_sums(squares, lambda shape: 1), strict=True
        ):
            root = (total.reshape(()) / step.numel).sqrt()
            update.div_((root / step.group["clip_threshold"]).clamp(min=1.0))


class Adafactor(FactoredBase):
    """Adafactor (Shazeer and Stern, "Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018, Algorithms 4, 5).

    Arguments and arithmetic are those of fairseq, transformers and ColossalAI: rows and columns have means where the
    paper has sums, with the same estimate; with `beta1` the first moment averages clipped updates that are already
    multiplied by their rate; weights decay by `weight_decay` times the rate. torch.optim.Adafactor differs: its `lr` is
    the paper's upper limit of the relative step, and it has no momentum.

    Bytes per element: 0 (4 for vectors), 4 more with `beta1`; 4 per row and column. Over shards two all-reduces: one
    number per row, column and parameter, and one number per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate, with `relative_step=False`; None with the relative step.
        eps: Term added to squared gradients, and lower limit of a parameter's root mean square. Both positive.
        clip_threshold: Upper limit of the root mean square of an update.
        decay_rate: Exponent of the second moments' decay: step t uses `1 - t ** decay_rate`.
        beta1: Decay rate of the first moment; optional, defaults to no first moment.
        weight_decay: Weight decay.
        scale_parameter: If True, the rate is multiplied by the root mean square of the parameter.
        relative_step: If True, the rate is `min(0.01, 1 / sqrt(t))`.
        warmup_init: If True, the relative step is `min(1e-6 * t, 1 / sqrt(t))`.

    Raises:
        ConfigError: A hyperparameter or a parameter is invalid.
    """

    _moments = ("exp_avg", "exp_avg_sq")
    _second_moments = ("exp_avg_sq",)
    _default_eps = (1e-30, 1e-3)

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
        check_flags(group, "scale_parameter", "relative_step", "warmup_init")
        _check_rate(group)
        self._check_eps(group)
        check_non_negative(group, "clip_threshold", is_positive=True, why="would clip every update to nothing")
        rate = group["decay_rate"]
        if not is_non_nan_number(rate) or not -1.0 <= rate < 0.0:
            raise ConfigError(
                f"decay_rate={rate!r} is out of range, as the decay 1 - t ** decay_rate must grow from 0 to 1: give a"
                " number in [-1, 0), such as -0.8"
            )
        if group["beta1"] is not None:
            check_decay_rates({"beta1": (group["beta1"],)}, "beta1", 1, example=(0.9,))
        check_non_negative(group, "weight_decay")

    def _update(self, steps: list[ParamUpdate]) -> None:
        for batch in UpdateBatch.split(steps, self._shards):
            scales = self._update_second_moments(batch)
            updates = [self._preconditioned(step, "exp_avg_sq", step.gradient) for step in batch.updates]
            self._clip(batch, updates)
            for step, update, scale in zip(batch.updates, updates, scales, strict=True):
                self._apply(step, update, scale)

    def _update_second_moments(self, batch: UpdateBatch) -> list[Tensor]:
        """Update the second moments; return the weights' root mean squares. Collective."""
        local_sums = [
            torch.cat([self._sums_of_squares(step, step.gradient), step.sum_of_squares(step.weights).reshape(1)])
            for step in batch.updates
        ]
        totals = batch.reduced_sums(local_sums, lambda shape: num_row_and_column_sums(shape) + 1)
        for step, total in zip(batch.updates, totals, strict=True):
            number = step.state["step"] = step.state.get("step", 0) + 1
            decay = 1.0 - number ** step.group["decay_rate"]
            eps = step.group["eps"][0]
            self._update_factored_second_moment(step, "exp_avg_sq", total[:-1], step.gradient, decay=decay, eps=eps)
        return [(total[-1] / step.numel).sqrt() for step, total in zip(batch.updates, totals, strict=True)]

    def _apply(self, step: ParamUpdate, update: Tensor, scale: Tensor) -> None:
        group, number = step.group, step.state["step"]
        rate: Tensor | float
        if group["relative_step"]:
            rate = min(1e-6 * number if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(number))
        else:
            rate = float(group["lr"])
        if group["scale_parameter"]:
            rate = scale.clamp(min=group["eps"][1]) * rate
        update.mul_(rate)
        if group["beta1"] is not None:
            update = self._state_tensor(step, "exp_avg").mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"]:
            step.weights.mul_(1 - group["weight_decay"] * rate)
        step.weights.sub_(update)


def _check_rate(group: Mapping[str, Any]) -> None:
    if group["relative_step"] and group["lr"] is not None:
        raise ConfigError(
            f"lr={group['lr']!r} would not be used, as relative_step=True computes the rate from the step number: pass"
            " relative_step=False (and scale_parameter=False for a rate independent of the weights), or omit lr"
        )
    if not group["relative_step"]:
        check_learning_rate(group)
    if group["warmup_init"] and not group["relative_step"]:
        raise ConfigError(
            "warmup_init=True is the warmup of the relative step, which relative_step=False disables: omit warmup_init,"
            " and warm lr up with booster.lr_scheduler.LinearWarmupLR"
        )


class CAME(FactoredBase):
    """CAME (Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", ACL 2023, Algorithm 2).

    As in the authors' and ColossalAI's code, rows and columns have means where the paper has sums; weights decay by
    `lr * weight_decay` before the update; and parameters of fewer than two dimensions, for which the paper defines no
    confidence, are updated by their first moment.

    Bytes per element: 4 for the first moment; 8 per row and column. Over shards three all-reduces: two with one number
    per row and column, and one with one number per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate; required, here or in every group.
        eps: Terms added to squared gradients, and to squared differences of update and first moment. Both positive.
        clip_threshold: Upper limit of the root mean square of an update.
        betas: Decay rates of the first moment, the squared gradients and the squared differences.
        weight_decay: Weight decay.

    Raises:
        ConfigError: A hyperparameter or a parameter is invalid.
    """

    _moments = ("exp_avg", "exp_avg_sq", "exp_avg_res")
    _second_moments = ("exp_avg_sq", "exp_avg_res")
    _default_eps = (1e-30, 1e-16)

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
        if "params" in group or group["lr"] is not None:  # defaults may omit lr if every group has one
            check_learning_rate(group)
        self._check_eps(group)
        check_non_negative(group, "clip_threshold", is_positive=True, why="would clip every update to nothing")
        check_decay_rates(group, "betas", 3, example=(0.9, 0.999, 0.9999))
        check_non_negative(group, "weight_decay")

    def _update(self, steps: list[ParamUpdate]) -> None:
        for batch in UpdateBatch.split(steps, self._shards):
            sums = batch.reduced_sums(
                [self._sums_of_squares(step, step.gradient) for step in batch.updates], num_row_and_column_sums
            )
            for step, total in zip(batch.updates, sums, strict=True):
                step.state["step"] = step.state.get("step", 0) + 1
                decay, eps = step.group["betas"][1], step.group["eps"][0]
                self._update_factored_second_moment(step, "exp_avg_sq", total, step.gradient, decay=decay, eps=eps)
            updates = [self._preconditioned(step, "exp_avg_sq", step.gradient) for step in batch.updates]
            self._clip(batch, updates)
            pairs = []
            for step, update in zip(batch.updates, updates, strict=True):
                beta1 = step.group["betas"][0]
                first = self._state_tensor(step, "exp_avg").mul_(beta1).add_(update, alpha=1 - beta1)
                pairs.append((step, update.sub_(first)))  # the difference, in the update's memory
            sums = batch.reduced_sums(
                [self._sums_of_squares(step, difference) for step, difference in pairs], num_row_and_column_sums
            )
            for (step, difference), total in zip(pairs, sums, strict=True):
                self._apply(step, difference, total)

    def _apply(self, step: ParamUpdate, difference: Tensor, sums: Tensor) -> None:
        lr, update = float(step.group["lr"]), self._state_tensor(step, "exp_avg")
        if len(step.shape) >= 2:
            decay, eps = step.group["betas"][2], step.group["eps"][1]
            self._update_factored_second_moment(step, "exp_avg_res", sums, difference, decay=decay, eps=eps)
            update = self._preconditioned(step, "exp_avg_res", update)
        step.weights.mul_(1 - lr * step.group["weight_decay"])
        step.weights.sub_(update, alpha=lr)
