"""File offsets of the shards to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from booster.checkpoint_io.planning.byte_runs import run_length, run_start
from booster.checkpoint_io.planning.held_parts import DedupedShards

__all__ = ["FilePlacement", "TensorOffsets", "sort_by_file_offset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOffsets:
    """File and offset of each tensor, as columns indexed by tensor.

    Attributes:
        file: File index.
        start: Offset in bytes within the file's data section.
        itemsize: Bytes per element.
        shapes: Shape of each tensor.
        num_files: Number of files.
    """

    file: np.ndarray
    offset: np.ndarray
    itemsize: np.ndarray
    shapes: Sequence[tuple[int, ...]]
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlacement:
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

    index: np.ndarray
    tensor: np.ndarray
    box: np.ndarray
    start: np.ndarray
    file: np.ndarray
    itemsize: np.ndarray
    num_bytes: np.ndarray
    is_strided: np.ndarray
    offset: np.ndarray
    primary: np.ndarray
    replicas: np.ndarray


def sort_by_file_offset(deduped: DedupedShards, tensor_offsets: TensorOffsets) -> FilePlacement:
    """Return the shards in file order; a strided shard is placed by its first byte."""
    tiles = deduped.tiles
    logical, is_strided = _locate(deduped, tensor_offsets.shapes)
    itemsize = tensor_offsets.itemsize[tiles.tensor]
    offset = tensor_offsets.offset[tiles.tensor] + logical * itemsize
    file = tensor_offsets.file[tiles.tensor]
    order = np.lexsort((offset, file))
    return FilePlacement(
        index=order,
        tensor=tiles.tensor[order],
        box=tiles.box[order],
        start=tiles.start[order],
        file=file[order],
        itemsize=itemsize[order],
        num_bytes=((tiles.stop - tiles.start) * itemsize)[order],
        is_strided=is_strided[order],
        offset=offset[order],
        primary=deduped.primary[order],
        replicas=deduped.replicas[order],
    )


def _locate(deduped: DedupedShards, shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Return each shard's first element in its flattened tensor, and whether it has more than one run."""
    tiles = deduped.tiles
    numbers: dict[tuple[int, ...], int] = {}
    shape_of = np.array([numbers.setdefault(shape, len(numbers)) for shape in shapes], dtype=np.int64)
    distinct = list(numbers)
    keys, pair_of = np.unique(shape_of[tiles.tensor] * len(deduped.boxes) + tiles.box, return_inverse=True)
    pairs = [(distinct[key // len(deduped.boxes)], deduped.boxes[key % len(deduped.boxes)]) for key in keys.tolist()]
    runs = np.array([run_length(shape, box) for shape, box in pairs], dtype=np.int64)[pair_of]
    starts = np.array([run_start(shape, box, 0) for shape, box in pairs], dtype=np.int64)[pair_of]
    logical = starts + tiles.start
    # Beyond the first run of a box, the offset is no longer linear in the element count.
    for row in np.flatnonzero(tiles.start >= runs).tolist():
        shape, box = pairs[pair_of[row]]
        logical[row] = run_start(shape, box, int(tiles.start[row]))
    return logical, tiles.start // runs != (tiles.stop - 1) // runs
