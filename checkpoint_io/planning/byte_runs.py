"""Where the bytes of a slice lie: box and span of a logical tensor, as runs of bytes that follow each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Box", "RunBlock", "byte_runs", "run_length", "run_start", "whole_box"]

Box = tuple[tuple[int, int], ...]  # per dimension the offset and the length, in elements


# Note [Runs of a box]: rows of a box follow each other in the logical tensor as long as the box is full in every
# dimension but the first of them. `k` is the last dimension that the box does not fill: the box's lengths from `k` on
# make one run, the lengths before `k` count the runs. Two runs that follow each other are never adjacent, as the box
# leaves out something of dimension `k` between them: so the runs are coalesced by construction.


@dataclass(frozen=True, slots=True)
class RunBlock:
    """Some runs of a slice, in slice order, as int64 columns in bytes.

    Attributes:
        logical: Where each run starts in the row-major logical tensor.
        local: Where each run starts in the slice's memory; 0 is the first element of the span.
        length: Length of each run.
    """

    logical: np.ndarray
    local: np.ndarray
    length: np.ndarray


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box that is the whole tensor."""
    return tuple((0, size) for size in shape)


def run_length(shape: Sequence[int], box: Box) -> int:
    """Returns how many elements of the box follow each other in the logical tensor; see Note [Runs of a box]."""
    partial = _last_partial(shape, box)
    return math.prod(length for _, length in box[partial:])


def run_start(shape: Sequence[int], box: Box, element: int) -> int:
    """Returns where an element, counted in the flattening of the box, is in the flattening of the logical tensor."""
    start, stride = 0, 1
    for size, (offset, length) in zip(reversed(shape), reversed(box), strict=True):
        element, index = divmod(element, length)
        start += (offset + index) * stride
        stride *= size
    return start


def byte_runs(
    shape: Sequence[int], box: Box, span: tuple[int, int], itemsize: int, *, max_runs: int = 65536
) -> Iterator[RunBlock]:
    """Yields the runs of a slice in slice order; no two of them could be one.

    Args:
        shape: Shape of the logical tensor.
        box: Block of it, per dimension offset and length.
        span: First element and one past the last, counted in the row-major flattening of the box.
        itemsize: Bytes of an element.
        max_runs: Most runs in one block, which bounds the memory.
    """
    start, stop = span
    if start == stop:
        return
    partial = _last_partial(shape, box)
    length = math.prod(length for _, length in box[partial:])
    first_run, end = start // length, (stop - 1) // length + 1
    if end - first_run == 1:  # most slices, and 100,000 of them are common
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
    """Returns the last dimension that the box does not fill; 0 where it fills all."""
    for dim in range(len(box) - 1, 0, -1):
        if box[dim][1] != shape[dim]:
            return dim
    return 0


def _starts(shape: Sequence[int], box: Box, partial: int, runs: np.ndarray) -> np.ndarray:
    """Returns where each run begins in the flattening of the logical tensor, in elements."""
    stride = math.prod(shape[partial + 1 :])
    starts = np.full(len(runs), box[partial][0] * stride if box else 0, dtype=np.int64)
    for dim in range(partial - 1, -1, -1):
        stride *= shape[dim + 1]
        offset, length = box[dim]
        starts += (offset + runs % length) * stride
        runs = runs // length
    return starts
