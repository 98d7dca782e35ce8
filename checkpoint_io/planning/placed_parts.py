"""Where in the files the held parts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from booster.checkpoint_io.planning.byte_runs import run_length, run_start
from booster.checkpoint_io.planning.held_parts import HeldParts

__all__ = ["PlacedParts", "Placement", "in_file_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where each tensor's bytes go, as columns by the tensor's number.

    Attributes:
        file: Number of the file.
        start: First byte, counted from the first byte of the file's data.
        itemsize: Bytes of an element.
        shapes: Shape.
        num_files: Number of files.
    """

    file: np.ndarray
    start: np.ndarray
    itemsize: np.ndarray
    shapes: Sequence[tuple[int, ...]]
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParts:
    """The parts in file order, as columns.

    Attributes:
        number: Number in HeldParts.
        tensor: Number of the tensor.
        box: Number of the box.
        start: First element of the span.
        file: Number of the file.
        itemsize: Bytes of an element.
        num_bytes: Size.
        is_strided: Whether the bytes lie scattered in the file.
        position: First byte in the data of the file.
        primary: Rank whose copy counts.
        holders: Which of the sets of holders.
    """

    number: np.ndarray
    tensor: np.ndarray
    box: np.ndarray
    start: np.ndarray
    file: np.ndarray
    itemsize: np.ndarray
    num_bytes: np.ndarray
    is_strided: np.ndarray
    position: np.ndarray
    primary: np.ndarray
    holders: np.ndarray


def in_file_order(held: HeldParts, placement: Placement) -> PlacedParts:
    """Returns the parts as they lie in the files, a strided one where its first byte is."""
    tiles = held.tiles
    logical, is_strided = _locate(held, placement.shapes)
    itemsize = placement.itemsize[tiles.tensor]
    position = placement.start[tiles.tensor] + logical * itemsize
    file = placement.file[tiles.tensor]
    order = np.lexsort((position, file))
    return PlacedParts(
        number=order,
        tensor=tiles.tensor[order],
        box=tiles.box[order],
        start=tiles.start[order],
        file=file[order],
        itemsize=itemsize[order],
        num_bytes=((tiles.stop - tiles.start) * itemsize)[order],
        is_strided=is_strided[order],
        position=position[order],
        primary=held.primary[order],
        holders=held.holders[order],
    )


def _locate(held: HeldParts, shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns each part's first element in the flattening of its tensor, and whether it is of more than one run."""
    tiles = held.tiles
    numbers: dict[tuple[int, ...], int] = {}
    shape_of = np.array([numbers.setdefault(shape, len(numbers)) for shape in shapes], dtype=np.int64)
    distinct = list(numbers)
    keys, pair_of = np.unique(shape_of[tiles.tensor] * len(held.boxes) + tiles.box, return_inverse=True)
    pairs = [(distinct[key // len(held.boxes)], held.boxes[key % len(held.boxes)]) for key in keys.tolist()]
    runs = np.array([run_length(shape, box) for shape, box in pairs], dtype=np.int64)[pair_of]
    starts = np.array([run_start(shape, box, 0) for shape, box in pairs], dtype=np.int64)[pair_of]
    logical = starts + tiles.start
    # Past the first run of a box, elements are no longer where its first element and their count say.
    for row in np.flatnonzero(tiles.start >= runs).tolist():
        shape, box = pairs[pair_of[row]]
        logical[row] = run_start(shape, box, int(tiles.start[row]))
    return logical, tiles.start // runs != (tiles.stop - 1) // runs
