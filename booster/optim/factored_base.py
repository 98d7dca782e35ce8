"""What Adafactor and CAME share: averages of squares, factored where that saves memory, and clipped updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from booster.errors import ConfigError
from booster.optim.base import OptimizerBase
from booster.optim.factored_squares import RowsAndColumns, is_factored, row_and_column_shapes
from booster.optim.whole_parameters import ParameterStep, StepBatch

__all__ = ["FactoredBase"]


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
        """Returns this rank's part of what `_take_squares` needs: nothing where the parameter is not factored."""
        return RowsAndColumns(step).sums_of_squares(tensor) if is_factored(step.shape) else tensor.new_zeros(0)

    def _take_squares(
        self, step: ParameterStep, average: str, sums: Tensor, tensor: Tensor, *, decay: float, eps: float
    ) -> None:
        """Takes the squares of a tensor, and `eps` in each of them, into an average.

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
        """Returns a new tensor: one of the parameter's shape over the root of an average."""
        if not is_factored(step.shape):
            return tensor * self._state_tensor(step, average).rsqrt()
        rows, columns = (self._state_tensor(step, f"{average}_{key}") for key in ("row", "col"))
        return RowsAndColumns(step).divided_by_root(tensor, rows, columns)

    def _clip(self, batch: StepBatch, updates: Sequence[Tensor]) -> None:
        """Divides updates whose root mean square is over the threshold by how much. Collective, one all-reduce."""
        own = [step.sum_of_squares(one).reshape(1) for step, one in zip(batch.steps, updates, strict=True)]
        for step, update, total in zip(batch.steps, updates, batch.sums(own, lambda shape: 1), strict=True):
            root = (total.reshape(()) / step.numel).sqrt()
            update.div_((root / step.group["clip_threshold"]).clamp(min=1.0))
