"""The mean of squares of every element of a matrix, kept as one number per row and one per column."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from booster.optim.whole_parameters import ParameterStep

__all__ = ["RowsAndColumns", "is_factored", "num_sums", "row_and_column_shapes"]

# Note [Factored squares]
# Shazeer and Stern (2018, section 3): with means of squares R over the rows and C over the columns of a matrix, the
# estimate of an element's mean square is R_i * C_j / mean(R). Of more than two dimensions the last two make matrices.
# A matrix of a single row or column is what one of them says already, so it is kept as it is: the same estimate.
# States are as torch.mean(keepdim=True) makes them, so that none can be taken for one with a value per element.


def is_factored(shape: Sequence[int]) -> bool:
    """Returns whether squares of a parameter of this shape are kept as rows and columns."""
    return len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1


def num_sums(shape: Sequence[int]) -> int:
    """Returns the number of rows and columns of a parameter together; 0: it is not factored."""
    if not is_factored(shape):
        return 0
    return sum(torch.Size(part).numel() for part in row_and_column_shapes(shape))


def row_and_column_shapes(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the two states of a parameter that is factored."""
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
        """Returns this rank's part of the sums of squares over rows, and over columns, as one vector.

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
        """Returns means over rows and columns of what `sums_of_squares` of all ranks make together."""
        rows, columns = sums.split([torch.Size(self._row_shape).numel(), torch.Size(self._column_shape).numel()])
        *_, num_rows, num_columns = self._step.shape
        return rows.view(self._row_shape) / num_columns, columns.view(self._column_shape) / num_rows

    def divided_by_root(self, tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns a tensor over the root of the estimate; see Note [Factored squares]. Padding becomes zero.

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
