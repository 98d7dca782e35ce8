"""Coverage check: shards of tensors must cover every element exactly once. Used by every save and load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .slices import Box, PlanTable, changes

_MAX_CORNERS = 2**18  # per batch, and per tensor: 65,536 boxes along two dimensions
_MAX_SHARDED_DIMS = 8

# Note [Corners of boxes]: the sum of the boxes' indicator functions equals the tensor's indicator function if and only
# if their mixed differences are equal. The mixed difference of a box is +1 or -1 at each corner and 0 elsewhere.
# So boxes tile a tensor if and only if all signed corners, the tensor's with the opposite sign, cancel: one sort, no
# pairwise comparison, and gaps cannot compensate for overlaps. At the first corner in row-major order that does not
# cancel, the remaining weight is the error in that element's count, and every element before it is correct.


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageViolation:
    """Element that is not covered exactly once.

    Attributes:
        tensor: Tensor index.
        index: Index of the element, one per dimension.
        num_covers: Number of shards that cover it.
    """

    tensor: int
    index: tuple[int, ...]
    num_covers: int


class CoverageLimitError(ValueError):
    """A tensor has more boxes than can be checked.

    Args:
        tensor: Tensor index.
        reason: Message text that follows the tensor's name.
    """

    def __init__(self, tensor: int, reason: str) -> None:
        super().__init__(reason)
        self.tensor = tensor


def check_coverage(
    shapes: Sequence[tuple[int, ...]], boxes: Sequence[Box], tiles: PlanTable
) -> CoverageViolation | None:
    """Return an element that is missing or covered more than once, or None if the shards tile every tensor.

    The spans of each box must tile the box, and the boxes of each tensor the tensor. Cost: O(n log n).

    Args:
        shapes: Shape of each tensor; below 2**63 elements.
        boxes: Boxes that `tiles` refers to.
        tiles: Shards, in any order; each lies within its tensor.

    Raises:
        CoverageLimitError: A tensor has more boxes, or more sharded dimensions, than the check supports.
    """
    numel = np.array([math.prod(shape) for shape in shapes], dtype=np.int64)
    volumes = np.array([math.prod(length for _, length in box) for box in boxes], dtype=np.int64)
    tiles = tiles.select(np.flatnonzero(tiles.start < tiles.stop))
    is_full = tiles.stop - tiles.start == numel[tiles.tensor]
    if is_full.all() and (np.bincount(tiles.tensor, minlength=len(shapes)) == (numel > 0)).all():
        return None  # the usual case: one shard per tensor, which is all of it
    tiles = tiles.select(np.lexsort((tiles.start, tiles.box, tiles.tensor)))
    is_first = changes(tiles.tensor, tiles.box)
    violation = _check_spans(boxes, volumes, tiles, is_first)
    return violation or _check_boxes(shapes, boxes, numel, volumes, tiles.select(np.flatnonzero(is_first)))


def contains(box: Box, span: tuple[int, int], index: Sequence[int]) -> bool:
    """Return whether a slice with this box and span contains the element."""
    element = 0
    for (offset, length), position in zip(box, index, strict=True):
        if not offset <= position < offset + length:
            return False
        element = element * length + position - offset
    return span[0] <= element < span[1]


def _check_spans(
    boxes: Sequence[Box], volumes: np.ndarray, tiles: PlanTable, is_first: np.ndarray
) -> CoverageViolation | None:
    """Return the first element of a box that its sorted spans do not cover exactly once."""
    expected = np.where(is_first, 0, np.roll(tiles.stop, 1))
    wrong = np.flatnonzero(tiles.start != expected)
    if len(wrong):
        row = int(wrong[0])
        element = int(min(tiles.start[row], expected[row]))
        times = 0 if tiles.start[row] > expected[row] else 2
        return _violation_in_box(boxes, tiles, row, element, times)
    short = np.flatnonzero(np.roll(is_first, -1) & (tiles.stop != volumes[tiles.box]))
    if len(short):
        return _violation_in_box(boxes, tiles, int(short[0]), int(tiles.stop[short[0]]), 0)
    return None


def _violation_in_box(boxes: Sequence[Box], tiles: PlanTable, row: int, element: int, times: int) -> CoverageViolation:
    index = []
    for offset, length in reversed(boxes[tiles.box[row]]):
        element, within = divmod(element, length)
        index.append(offset + within)
    return CoverageViolation(tensor=int(tiles.tensor[row]), index=tuple(reversed(index)), num_covers=times)


def _check_boxes(
    shapes: Sequence[tuple[int, ...]], boxes: Sequence[Box], numel: np.ndarray, volumes: np.ndarray, tiles: PlanTable
) -> CoverageViolation | None:
    """Return the first element that full boxes do not cover exactly once. One row per tensor and box."""
    num_boxes = np.bincount(tiles.tensor, minlength=len(shapes))
    missing = np.flatnonzero((num_boxes == 0) & (numel > 0))
    if len(missing):
        return CoverageViolation(tensor=int(missing[0]), index=(0,) * len(shapes[missing[0]]), num_covers=0)
    is_full = (num_boxes[tiles.tensor] == 1) & (volumes[tiles.box] == numel[tiles.tensor])
    tiles = tiles.select(np.flatnonzero(~is_full))
    num_dims = np.array([len(shape) for shape in shapes], dtype=np.int64)[tiles.tensor]
    for count in np.unique(num_dims):
        violation = _check_corners(shapes, boxes, tiles.select(np.flatnonzero(num_dims == count)))
        if violation is not None:
            return violation
    return None


def _check_corners(
    shapes: Sequence[tuple[int, ...]], boxes: Sequence[Box], tiles: PlanTable
) -> CoverageViolation | None:
    """Implement `_check_boxes` for tensors with equal numbers of dimensions; see Note [Corners of boxes]."""
    used, box_of = np.unique(tiles.box, return_inverse=True)
    bounds = np.array([boxes[number] for number in used.tolist()], dtype=np.int64)
    begins = bounds[box_of, :, 0]
    ends = begins + bounds[box_of, :, 1]
    tensors, shape_of = np.unique(tiles.tensor, return_inverse=True)
    sizes = np.array([shapes[number] for number in tensors.tolist()], dtype=np.int64)
    is_sharded = ((begins != 0) | (ends != sizes[shape_of])).any(axis=0)
    dims = np.flatnonzero(is_sharded)
    for rows in _batches(tiles.tensor, len(dims)):
        tensors_in_batch = np.unique(shape_of[rows])
        tensor = np.concatenate([shape_of[rows], tensors_in_batch])
        low = np.concatenate([begins[rows][:, dims], np.zeros((len(tensors_in_batch), len(dims)), dtype=np.int64)])
        high = np.concatenate([ends[rows][:, dims], sizes[tensors_in_batch][:, dims]])
        weight = np.where(np.arange(len(tensor)) < len(tensor) - len(tensors_in_batch), 1, -1)
        uncancelled = _first_uncancelled(tensor, low, high, weight)
        if uncancelled is not None:
            number, corner, excess = uncancelled
            index = np.zeros(bounds.shape[1], dtype=np.int64)
            index[dims] = corner
            return CoverageViolation(tensor=int(tensors[number]), index=tuple(index.tolist()), num_covers=excess + 1)
    return None


def _batches(tensor: np.ndarray, num_dims: int) -> Iterator[slice]:
    """Yield row ranges of complete tensors, bounded in their number of corners."""
    most = _MAX_CORNERS >> num_dims
    edges = np.append(np.flatnonzero(changes(tensor)), len(tensor))
    begin = 0
    while begin < len(tensor):
        end = int(edges[np.searchsorted(edges, begin + most, side="right") - 1])
        if end == begin or num_dims > _MAX_SHARDED_DIMS:
            raise CoverageLimitError(
                int(tensor[begin]), f"is sharded along {num_dims} dimensions into more boxes than can be checked"
            )
        yield slice(begin, end)
        begin = end


def _first_uncancelled(
    tensor: np.ndarray, low: np.ndarray, high: np.ndarray, weight: np.ndarray
) -> tuple[int, np.ndarray, int] | None:
    """Return tensor, index and weight of the first corner that does not cancel, or None if all do."""
    num_dims = low.shape[1]
    sides = list(itertools.product((False, True), repeat=num_dims))
    corners = np.concatenate([np.where(np.array(side, dtype=bool), high, low) for side in sides])
    weights = np.concatenate([weight * (-1) ** sum(side) for side in sides])
    tensors = np.tile(tensor, len(sides))
    columns = [tensors, *(corners[:, dim] for dim in range(num_dims))]
    order = np.lexsort(columns[::-1])
    columns = [column[order] for column in columns]
    firsts = np.flatnonzero(changes(*columns))
    sums = np.add.reduceat(weights[order], firsts)
    wrong = np.flatnonzero(sums)
    if not len(wrong):
        return None
    row = firsts[wrong[0]]
    return int(columns[0][row]), corners[order[row]], int(sums[wrong[0]])
