"""Contiguous byte runs of a slice (offsets/sizes box and flat range) within its logical tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Box", "RunBlock", "byte_runs", "full_box", "run_length", "run_start"]

Box = tuple[tuple[int, int], ...]  # per dimension the offset and the length, in elements


# Note [Runs of a box]: let `k` be the last dimension that the box does not fill. The product of the box's lengths from
# `k` on is the length of one contiguous run; the product of the lengths before `k` is the number of runs. Consecutive
# runs are never adjacent, because the box omits elements of dimension `k` between them: so runs are maximal.


@dataclass(frozen=True, slots=True)
class RunBlock:
    """Batch of runs of a slice in slice order, as int64 columns in bytes.

    Attributes:
        logical: Offset of each run in the row-major logical tensor.
        local: Offset of each run in the slice's memory; 0 is the first element of the span.
        length: Length of each run.
    """

    logical: np.ndarray
    local: np.ndarray
    length: np.ndarray


def full_box(shape: Sequence[int]) -> Box:
    """Return the box that covers the full tensor."""
    return tuple((0, size) for size in shape)


def run_length(shape: Sequence[int], box: Box) -> int:
    """Return the run length of the box in elements; see Note [Runs of a box]."""
    partial = _last_partial(shape, box)
    return math.prod(length for _, length in box[partial:])


def run_start(shape: Sequence[int], box: Box, element: int) -> int:
    """Map a flat index within the box to a flat index within the logical tensor."""
    start, stride = 0, 1
    for size, (offset, length) in zip(reversed(shape), reversed(box), strict=True):
        element, index = divmod(element, length)
        start += (offset + index) * stride
        stride *= size
    return start


def byte_runs(
    shape: Sequence[int], box: Box, span: tuple[int, int], itemsize: int, *, max_runs: int = 65536
) -> Iterator[RunBlock]:
    """Yield the maximal runs of a slice in slice order.

    Args:
        shape: Shape of the logical tensor.
        box: Offset and length per dimension.
        span: Flat range (start, stop) within the row-major flattening of the box.
        itemsize: Bytes per element.
        max_runs: Maximum runs per yielded block; bounds memory.
    """
    start, stop = span
    if start == stop:
        return
    partial = _last_partial(shape, box)
    length = math.prod(length for _, length in box[partial:])
    first_run, end = start // length, (stop - 1) // length + 1
    if end - first_run == 1:  # fast path: the usual case, often for 100,000 slices
        logical = run_start(shape, box, start) * itemsize
        yield RunBlock(logical=_column(logical), local=_column(0), length=_column((stop - start) * itemsize))
        return
    for first in range(first_run, end, max_runs):
        runs = np.arange(first, min(first + max_runs, end), dtype=np.int64)
        begin = np.maximum(runs * length, start)
        size = np.minimum((runs + 1) * length, stop) - begin
        starts = _starts(shape, box, partial, runs) + (begin - runs * length)
        yield RunBlock(logical=starts * itemsize, local=(begin - start) * itemsize, length=size * itemsize)


def _column(value: int) -> np.ndarray:
    return np.array([value], dtype=np.int64)


def _last_partial(shape: Sequence[int], box: Box) -> int:
    """Return the last dimension that the box does not fill, or 0 if it fills all."""
    for dim in range(len(box) - 1, 0, -1):
        if box[dim][1] != shape[dim]:
            return dim
    return 0


def _starts(shape: Sequence[int], box: Box, partial: int, runs: np.ndarray) -> np.ndarray:
    """Return the start of each run in the flattened logical tensor, in elements."""
    stride = math.prod(shape[partial + 1 :])
    starts = np.full(len(runs), box[partial][0] * stride if box else 0, dtype=np.int64)
    for dim in range(partial - 1, -1, -1):
        stride *= shape[dim + 1]
        offset, length = box[dim]
        starts += (offset + runs % length) * stride
        runs = runs // length
    return starts
