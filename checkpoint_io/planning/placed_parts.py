"""File offsets of the shards to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from booster.checkpoint_io.planning.byte_runs import run_length, run_start
from booster.checkpoint_io.planning.held_parts import HeldParts

__all__ = ["PlacedParts", "Placement", "in_file_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """File and offset of each tensor, as columns indexed by tensor.

    Attributes:
        file: File index.
        start: Offset in bytes within the file's data section.
        itemsize: Bytes per element.
        shapes: Shape of each tensor.
        num_files: Number of files.
    """

    file: np.ndarray
    start: np.ndarray
    itemsize: np.ndarray
    shapes: Sequence[tuple[int, ...]]
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParts:
    """Shards in file order, as columns.

    Attributes:
        number: Index in HeldParts.
        tensor: Tensor index.
        box: Box index.
        start: First element of the span.
        file: File index.
        itemsize: Bytes per element.
        num_bytes: Size in bytes.
        is_strided: Whether the shard is more than one run in the file.
        position: Offset of the first byte in the file's data section.
        primary: Primary rank.
        holders: Index into the sets of replicas.
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
    """Return the shards in file order; a strided shard is placed by its first byte."""
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
    """Return each shard's first element in its flattened tensor, and whether it has more than one run."""
    tiles = held.tiles
    numbers: dict[tuple[int, ...], int] = {}
    shape_of = np.array([numbers.setdefault(shape, len(numbers)) for shape in shapes], dtype=np.int64)
    distinct = list(numbers)
    keys, pair_of = np.unique(shape_of[tiles.tensor] * len(held.boxes) + tiles.box, return_inverse=True)
    pairs = [(distinct[key // len(held.boxes)], held.boxes[key % len(held.boxes)]) for key in keys.tolist()]
    runs = np.array([run_length(shape, box) for shape, box in pairs], dtype=np.int64)[pair_of]
    starts = np.array([run_start(shape, box, 0) for shape, box in pairs], dtype=np.int64)[pair_of]
    logical = starts + tiles.start
    # Beyond the first run of a box, the offset is no longer linear in the element count.
    for row in np.flatnonzero(tiles.start >= runs).tolist():
        shape, box = pairs[pair_of[row]]
        logical[row] = run_start(shape, box, int(tiles.start[row]))
    return logical, tiles.start // runs != (tiles.stop - 1) // runs
