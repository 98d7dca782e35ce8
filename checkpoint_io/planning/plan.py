"""Save plan: file and offset of each tensor, and the rank that writes each range. Pure functions, no communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from booster.checkpoint_io.layout import FileNames, FilePlan, plan_files
from booster.checkpoint_io.planning.byte_runs import Box
from booster.checkpoint_io.planning.held_parts import dedup_shards
from booster.checkpoint_io.planning.placed_parts import TensorOffsets
from booster.checkpoint_io.planning.slice_table import SliceTable
from booster.checkpoint_io.planning.write_shares import BLOCK_BYTES, RangeColumns, balance_writes
from booster.interface import TensorSpec

__all__ = ["BLOCK_BYTES", "PlannedFile", "SavePlan", "WriteRange", "plan_save"]

_RANGES_PER_BATCH = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRange:
    """Range of a tensor that one rank writes, at most `BLOCK_BYTES` long.

    Attributes:
        owner: Rank that holds it in memory.
        writer: Rank that writes it; differs from the owner if the file is assigned to another host.
        slice_index: Index of the owner's slice that contains it.
        name: Name of the tensor.
        file: Index into the plan's files.
        box: Box of the slice.
        span: Flat range (start, stop) within the row-major flattening of the box.
    """

    owner: int
    writer: int
    slice_index: int
    name: str
    file: int
    box: Box
    span: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """Tensor file.

    Attributes:
        name: File name.
        tensors: Tensors in file order: wide dtypes first, then in plan order.
        starts: Offset of each tensor in bytes within the data section; there are no gaps.
        data_bytes: Total size of the tensors.
    """

    name: str
    tensors: dict[str, TensorSpec]
    starts: dict[str, int]
    data_bytes: int


class SavePlan:
    """Save plan: files, tensors and write ranges. Identical on every rank; built by `plan_save`.

    Attributes:
        files: Tensor files.
        index: Name of the index file, or None without one.
        specs: Dtype and shape of every tensor, in the order of the ranks' tables.
        total_bytes: Total size of the tensors.
    """

    def __init__(
        self,
        files: list[PlannedFile],
        index: str | None,
        specs: dict[str, TensorSpec],
        boxes: list[Box],
        ranges: RangeColumns,
    ) -> None:
        self.files = files
        self.index = index
        self.specs = specs
        self.total_bytes = sum(file.data_bytes for file in files)
        self._names = list(specs)
        self._boxes = boxes
        self._ranges = ranges

    def ranges_written_by(self, rank: int) -> list[WriteRange]:
        """Return the ranges that `rank` writes, in plan order."""
        return list(self._at(np.flatnonzero(self._ranges.writer == rank)))

    def ranges_owned_by(self, rank: int) -> list[WriteRange]:
        """Return the ranges that `rank` holds in memory, in plan order."""
        return list(self._at(np.flatnonzero(self._ranges.owner == rank)))

    def all_ranges(self) -> Iterator[WriteRange]:
        """Yield every range once, in plan order: by file, then by tensor in file order."""
        for first in range(0, len(self._ranges.owner), _RANGES_PER_BATCH):
            yield from self._at(np.arange(first, min(first + _RANGES_PER_BATCH, len(self._ranges.owner))))

    def _at(self, rows: np.ndarray) -> Iterator[WriteRange]:
        columns = self._ranges
        for owner, writer, slice_index, tensor, file, box, start, stop in zip(
            *(getattr(columns, column.name)[rows].tolist() for column in fields(columns)), strict=True
        ):
            yield WriteRange(
                owner=owner,
                writer=writer,
                slice_index=slice_index,
                name=self._names[tensor],
                file=file,
                box=self._boxes[box],
                span=(start, stop),
            )


def plan_save(
    tables: Sequence[SliceTable],
    table_of_rank: Sequence[int],
    names: FileNames,
    *,
    max_shard_bytes: int,
    is_sharded: bool,
    always_index: bool,
    host_of_rank: Sequence[int] | None = None,
) -> SavePlan:
    """Compute the save plan.

    Args:
        tables: Distinct slice tables of all ranks.
        table_of_rank: Index into `tables` for each rank.
        names: File names.
        max_shard_bytes: Maximum file size; a single larger tensor gets its own larger file.
        is_sharded: If True, number the files and write an index if there is more than one. If False, write one file.
        always_index: If True, number the files and write an index even for a single file.
        host_of_rank: Host index of each rank; a file is written by ranks of one host only. Optional, defaults to a
            single host.

    Raises:
        CheckpointError: Ranks disagree about a tensor, or the primary slices do not cover every element of every
            tensor exactly once.
    """
    deduped = dedup_shards(tables, table_of_rank)
    sizes = {name: math.prod(spec.shape) * spec.dtype.itemsize for name, spec in deduped.specs.items()}
    planned = FilePlan(files={names.single: tuple(sizes)}, index=None)
    if is_sharded:
        planned = plan_files(sizes, names, max_shard_bytes=max_shard_bytes, always_index=always_index)
    files = [_planned_file(name, tensors, deduped.specs, sizes) for name, tensors in planned.files.items()]
    hosts = np.zeros(len(table_of_rank), dtype=np.int64)
    if host_of_rank is not None:
        hosts = np.unique(np.array(host_of_rank, dtype=np.int64), return_inverse=True)[1]
    ranges = balance_writes(deduped, _tensor_offsets(files, deduped.specs), hosts)
    return SavePlan(files, planned.index, deduped.specs, deduped.boxes, ranges)


def _planned_file(
    name: str, tensors: Sequence[str], specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]
) -> PlannedFile:
    # Wide dtypes first, as in `encode_header`: every tensor is aligned to its element size without gaps.
    ordered = sorted(tensors, key=lambda tensor: -specs[tensor].dtype.itemsize)
    stops = list(itertools.accumulate((sizes[tensor] for tensor in ordered), initial=0))
    return PlannedFile(
        name=name,
        tensors={tensor: specs[tensor] for tensor in ordered},
        starts=dict(zip(ordered, stops, strict=False)),
        data_bytes=stops[-1],
    )


def _tensor_offsets(files: Sequence[PlannedFile], specs: Mapping[str, TensorSpec]) -> TensorOffsets:
    file_and_offset = {
        name: (number, start) for number, file in enumerate(files) for name, start in file.starts.items()
    }
    columns = np.array([file_and_offset[name] for name in specs], dtype=np.int64).reshape(-1, 2)
    return TensorOffsets(
        file=columns[:, 0],
        offset=columns[:, 1],
        itemsize=np.array([spec.dtype.itemsize for spec in specs.values()], dtype=np.int64),
        shapes=[spec.shape for spec in specs.values()],
        num_files=len(files),
    )
