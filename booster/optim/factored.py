"""Adafactor: Adam without the memory that its second moments take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from booster.errors import ConfigError

from .base import OptimizerBase, require_amount, require_flag, require_fractions, require_learning_rate
from .param_update import ParameterStep, StepBatch

# Note [Factored squares]
# Shazeer and Stern (2018, section 3): with means of squares R over the rows and C over the columns of a matrix, the
# estimate of an element's mean square is R_i * C_j / mean(R). Of more than two dimensions the last two make matrices.
# A matrix of a single row or column is what one of them says already, so it is kept as it is: the same estimate.
# States are as torch.mean(keepdim=True) makes them, so that none can be taken for one with a value per element.


def is_factored(shape: Sequence[int]) -> bool:
    """Return whether squares of a parameter of this shape are kept as rows and columns."""
    return len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1


def num_sums(shape: Sequence[int]) -> int:
    """Return the number of rows and columns of a parameter together; 0: it is not factored."""
    if not is_factored(shape):
        return 0
    return sum(torch.Size(part).numel() for part in row_and_column_shapes(shape))


def row_and_column_shapes(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the two states of a parameter that is factored."""
    return (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])


class RowsAndColumns:
    """Where the rows and columns of a parameter lie, of which this rank may have a part.

    Args:
        step: With the parameter, which is factored.
    """

    def __init__(self, step: ParameterStep) -> None:
        self._step = step
        self._row_shape, self._column_shape = row_and_column_shapes(step.shape)

    def sums_of_squares(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the sums of squares over rows, and over columns, as one vector.

        Args:
            tensor: Of the parameter's shape, in this rank's part.
        """
        rows = tensor.new_zeros(self._row_shape)
        columns = tensor.new_zeros(self._column_shape)
        for block in self._step.blocks(tensor):
            if block.is_owned:
                squares = block.view.square()
                rows[_rows_of(block.box)] += squares.sum(dim=-1, keepdim=True)
                columns[_columns_of(block.box)] += squares.sum(dim=-2, keepdim=True)
        return torch.cat([rows.flatten(), columns.flatten()])

    def means(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return means over rows and columns of what `sums_of_squares` of all ranks make together."""
        rows, columns = sums.split([torch.Size(self._row_shape).numel(), torch.Size(self._column_shape).numel()])
        *_, num_rows, num_columns = self._step.shape
        return rows.view(self._row_shape) / num_columns, columns.view(self._column_shape) / num_rows

    def divided_by_root(self, tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return a tensor over the root of the estimate; see Note [Factored squares]. Padding becomes zero.

        Args:
            tensor: Of the parameter's shape, in this rank's part.
            rows: Means of squares.
            columns: Means of squares.
        """
        row_factors = (rows / rows.mean(dim=-2, keepdim=True)).rsqrt()
        column_factors = columns.rsqrt()
        result = torch.zeros_like(tensor)
        for source, target in zip(self._step.blocks(tensor), self._step.blocks(result), strict=True):
            torch.mul(source.view, row_factors[_rows_of(source.box)], out=target.view)
            target.view.mul_(column_factors[_columns_of(source.box)])
        return result


def _rows_of(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return (*(slice(offset, offset + length) for offset, length in box[:-1]), slice(None))


def _columns_of(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    *matrices, _, (offset, length) = box
    return (*(slice(start, start + size) for start, size in matrices), slice(None), slice(offset, offset + length))


class FactoredBase(OptimizerBase):
    """An optimizer that keeps averages of squares by rows and columns; see Note [Factored squares]."""

    _averages: ClassVar[tuple[str, ...]] = ()
    """The averages; one that is factored is two states, whose names end in _row and _col."""

    _usual_eps: ClassVar[tuple[float, float]]

    def _check_small_pair(self, group: Mapping[str, Any]) -> None:
        pair = group["eps"]
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(one, float) and 0 < one < float("inf") for one in pair):
            raise ConfigError(
                f"eps={pair!r} is not the pair of small numbers that keep divisors and rates from zero: give two"
                f" positive floats, such as {self._usual_eps}"
            )

    def _state_shape(self, parameter: Tensor, key: str) -> tuple[int, ...] | None:
        average, _, side = key.rpartition("_")
        if average not in self._averages or side not in ("row", "col"):
            return super()._state_shape(parameter, key)
        shard = None if self._shards is None else self._shards.shard_of(parameter)
        shape = tuple(parameter.shape) if shard is None else shard.global_shape
        if not is_factored(shape):
            return None
        return row_and_column_shapes(shape)[0 if side == "row" else 1]

    def _sums_of_squares(self, step: ParameterStep, tensor: Tensor) -> Tensor:
        """Return this rank's part of what `_take_squares` needs: nothing where the parameter is not factored."""
        return RowsAndColumns(step).sums_of_squares(tensor) if is_factored(step.shape) else tensor.new_zeros(0)

    def _take_squares(
        self, step: ParameterStep, average: str, sums: Tensor, tensor: Tensor, *, decay: float, eps: float
    ) -> None:
        """Take the squares of a tensor, and `eps` in each of them, into an average.

        Args:
            step: Of the parameter.
            average: One of `_averages`.
            sums: Of the whole parameter's `_sums_of_squares`.
            tensor: This rank's part.
            decay: How much of the average remains.
            eps: Added to every square.
        """
        if not is_factored(step.shape):
            squares = self._state_tensor(step, average)
            squares.mul_(decay).addcmul_(tensor, tensor, value=1.0 - decay).add_(eps * (1.0 - decay))
            return
        for key, means in zip(("row", "col"), RowsAndColumns(step).means(sums), strict=True):
            self._state_tensor(step, f"{average}_{key}").mul_(decay).add_(means + eps, alpha=1.0 - decay)

    def _divided(self, step: ParameterStep, average: str, tensor: Tensor) -> Tensor:
        """Return a new tensor: one of the parameter's shape over the root of an average."""
        if not is_factored(step.shape):
            return tensor * self._state_tensor(step, average).rsqrt()
        rows, columns = (self._state_tensor(step, f"{average}_{key}") for key in ("row", "col"))
        return RowsAndColumns(step).divided_by_root(tensor, rows, columns)

    def _clip(self, batch: StepBatch, updates: Sequence[Tensor]) -> None:
        """Divide updates whose root mean square is over the threshold by how much. Collective, one all-reduce."""
        own = [step.sum_of_squares(one).reshape(1) for step, one in zip(batch.steps, updates, strict=True)]
        for step, update, total in zip(batch.steps, updates, batch.sums(own, lambda shape: 1), strict=True):
            root = (total.reshape(()) / step.numel).sqrt()
            update.div_((root / step.group["clip_threshold"]).clamp(min=1.0))


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
        """Take the gradients into their averages; returns the weights' root mean squares. Collective."""
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
        """Take an update into the first moment; returns by how much they differ, in its place."""
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
