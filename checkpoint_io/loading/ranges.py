"""Parallel reading of the bytes of this rank's slices, in place where possible, and verification of checksums."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from booster.checkpoint_io.copy_elements import bytes_of, copy_elements, needs_no_conversion
from booster.checkpoint_io.formats.manifest import RangeRecord
from booster.checkpoint_io.formats.tensor_files import TensorFile
from booster.checkpoint_io.parallel import run_in_threads
from booster.checkpoint_io.planning.slices import Box, RunBlock, byte_runs, full_box, run_length, run_start
from booster.checkpoint_io.storage import OpenFile
from booster.errors import CheckpointError
from booster.interface import TensorSlice
from booster.kernels.checksum import crc32

from .reader import StoredCheckpoint

# A column of a matrix is many runs of a few bytes, and one read per run is slower than reading the gaps as well. So
# runs with gaps of at most MAX_GAP_BYTES are read together into a scratch buffer and extracted from it. Runs that fill
# the scratch alone, or are farther apart, are read directly into the output.
SCRATCH_BYTES = 2 * 2**20
MAX_GAP_BYTES = 16 * 2**10
_RUNS_PER_BATCH = 16384
_LONG_RUN_BYTES = 256  # from here on, copying each run is faster than indexing each element
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(slots=True, eq=False)
class ElementReader:
    """Reads elements of a checkpoint's tensors. Not thread-safe.

    Args:
        stored: Open checkpoint.
    """

    _stored: StoredCheckpoint
    _scratch: np.ndarray | None = field(default=None, init=False)

    def read(self, name: str, box: Box, span: tuple[int, int], out: np.ndarray) -> None:
        """Fill a buffer with the elements of a slice, in slice order, in the stored dtype.

        Args:
            name: Name of the stored tensor.
            box: Offset and length per dimension.
            span: Flat range (start, stop) within the row-major flattening of the box.
            out: Contiguous uint8 array of the exact size.

        Raises:
            CheckpointError: The file is truncated or changed.
        """
        start, stop = span
        if start == stop:
            return
        spec, location = self._stored.specs[name], self._stored.locate(name)
        if location is None:
            block = self._stored.read(name)[tuple(slice(offset, offset + length) for offset, length in box)]
            copy_elements(block, start, stop, torch.from_numpy(out), block.dtype)
            return
        file, offset = location
        itemsize = spec.dtype.itemsize
        length = run_length(spec.shape, box)
        if start // length == (stop - 1) // length:
            self._stored.storage.read_at(file, out.data, offset + run_start(spec.shape, box, start) * itemsize)
            return
        for run_block in byte_runs(spec.shape, box, span, itemsize, max_runs=_RUNS_PER_BATCH):
            for group in _groups(run_block):
                self._read_group(file, offset, group, itemsize, out)

    def _read_group(self, file: OpenFile, offset: int, runs: RunBlock, itemsize: int, out: np.ndarray) -> None:
        first, last = int(runs.logical[0]), int(runs.logical[-1] + runs.length[-1])
        target = out[runs.local[0] : runs.local[-1] + runs.length[-1]]
        if len(runs.logical) == 1:
            self._stored.storage.read_at(file, target.data, offset + first)
            return
        if self._scratch is None:
            self._scratch = np.empty(SCRATCH_BYTES, dtype=np.uint8)
        scratch = self._scratch[: last - first]
        self._stored.storage.read_at(file, scratch.data, offset + first)
        _extract_runs(scratch, runs.logical - first, runs.length, itemsize, target)


def assign_elements(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Copy values into a tensor's row-major flattening, from element `start` on.

    The tensor may have any strides, device and dtype; values are converted.
    """
    if values.numel() == 0:
        return
    for view, first, last in _flat_views(tensor, start, start + values.numel()):
        view.copy_(values[first:last].view(view.shape))


def _flat_views(tensor: torch.Tensor, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield views that together are elements `start` to `stop` of the flattening, each with its offset from `start`."""
    if tensor.dim() <= 1:
        yield tensor[start:stop] if tensor.dim() == 1 else tensor, 0, stop - start
        return
    row = math.prod(tensor.shape[1:])
    first_row, last_row = -(-start // row), stop // row
    if first_row > last_row:  # within one row
        yield from _flat_views(tensor[last_row], start - last_row * row, stop - last_row * row)
        return
    if start < first_row * row:
        yield from _flat_views(tensor[first_row - 1], start - (first_row - 1) * row, row)
    if first_row < last_row:
        yield tensor[first_row:last_row], first_row * row - start, last_row * row - start
    if last_row * row < stop:
        done = last_row * row - start
        for view, first, last in _flat_views(tensor[last_row], 0, stop - last_row * row):
            yield view, done + first, done + last


def _groups(block: RunBlock) -> Iterator[RunBlock]:
    ends = block.logical + block.length
    breaks = np.flatnonzero(block.logical[1:] - ends[:-1] > MAX_GAP_BYTES) + 1
    first = 0
    while first < len(ends):
        scratch_end = int(np.searchsorted(ends, block.logical[first] + SCRATCH_BYTES, side="right"))
        position = int(np.searchsorted(breaks, first, side="right"))
        limit = int(breaks[position]) if position < len(breaks) else len(ends)
        last = max(first + 1, min(scratch_end, limit))
        rows = slice(first, last)
        yield RunBlock(logical=block.logical[rows], local=block.local[rows], length=block.length[rows])
        first = last


def _extract_runs(scratch: np.ndarray, starts: np.ndarray, lengths: np.ndarray, itemsize: int, out: np.ndarray) -> None:
    """Concatenate the runs of a scratch buffer."""
    is_regular = bool((lengths == lengths[0]).all() and (np.diff(starts) == starts[1] - starts[0]).all())
    if lengths.mean() >= _LONG_RUN_BYTES and not is_regular:
        position = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            out[position : position + length] = scratch[start : start + length]
            position += length
        return
    unit = _UNSIGNED[itemsize]
    source, target = scratch.view(unit), out.view(unit)
    starts, lengths = starts // itemsize, lengths // itemsize
    if is_regular:
        shape, strides = (len(starts), int(lengths[0])), (int(starts[1] - starts[0]) * itemsize, itemsize)
        target.reshape(shape)[...] = np.lib.stride_tricks.as_strided(source, shape, strides)
        return
    before = np.cumsum(lengths) - lengths
    index = np.repeat(starts - before, lengths) + np.arange(len(target))
    np.take(source, index, out=target, mode="clip")  # the default mode copies through a buffer


# A slice in contiguous CPU memory with the stored dtype is read in place. All others (other dtype, strides or device)
# go through a staging buffer in several reads. Four threads hold 4 * (STAGING_BYTES + SCRATCH_BYTES) = 32 MiB, for any
# model size.
READ_BYTES = 16 * 2**20
STAGING_BYTES = 6 * 2**20


@dataclass(frozen=True, slots=True)
class _FillTarget:
    """Slice to fill, with its memory as bytes if it can be read in place."""

    stored_name: str
    destination: TensorSlice
    tensor: torch.Tensor
    dtype: torch.dtype
    memory: np.ndarray | None


@dataclass(frozen=True, slots=True)
class _ReadRange:
    """Range of elements of a slice, counted from its first."""

    target: _FillTarget
    start: int
    stop: int


def read_slices(
    stored: StoredCheckpoint, named_slices: Sequence[tuple[str, TensorSlice]], *, num_threads: int = 4
) -> None:
    """Fill slices from a checkpoint. Not collective.

    Peak extra memory is 32 MiB with four threads, for any tensor size.

    Args:
        stored: Open checkpoint; its checksums are verified before, by `verify_ranges`.
        named_slices: Stored name and slice to fill; floats are converted to the dtype of the slice's memory.
        num_threads: Number of reader threads.

    Raises:
        CheckpointError: A file is truncated, or changed since it was opened.
    """
    targets: list[_FillTarget] = []
    for name, tensor_slice in named_slices:
        tensor, dtype = tensor_slice.tensor.detach(), stored.specs[name].dtype
        is_plain = needs_no_conversion(tensor, dtype) and tensor.numel() > 0
        memory = np.frombuffer(bytes_of(tensor), dtype=np.uint8) if is_plain else None
        targets.append(_FillTarget(name, tensor_slice, tensor, dtype, memory))
    batches = list(_batches(targets))
    run_in_threads(lambda batch: _fill(stored, batch), batches, min(num_threads, len(batches)))
    for target in targets:
        if target.memory is not None and not target.tensor.is_inference():
            torch.autograd.graph.increment_version(target.tensor)  # as a copy_ would


def _fill(stored: StoredCheckpoint, batch: Sequence[_ReadRange]) -> None:
    reader = ElementReader(stored)
    staging: np.ndarray | None = None
    for read_range in batch:
        target, start, stop = read_range.target, read_range.start, read_range.stop
        itemsize = target.dtype.itemsize
        if target.memory is not None:
            out = target.memory[start * itemsize : stop * itemsize]
        else:
            if staging is None:
                staging = np.empty(STAGING_BYTES, dtype=np.uint8)
            out = staging[: (stop - start) * itemsize]
        first = target.destination.span[0]
        reader.read(target.stored_name, target.destination.box, (first + start, first + stop), out)
        if target.memory is None:
            assign_elements(target.tensor, start, torch.from_numpy(out).view(target.dtype))


def _batches(targets: Sequence[_FillTarget]) -> Iterator[list[_ReadRange]]:
    """Group the ranges into batches for the threads: large slices are split, small ones combined."""
    batch: list[_ReadRange] = []
    free_bytes = READ_BYTES
    for target in targets:
        itemsize = target.dtype.itemsize
        step = (READ_BYTES if target.memory is not None else STAGING_BYTES) // itemsize
        for start in range(0, target.tensor.numel(), step):
            stop = min(start + step, target.tensor.numel())
            batch.append(_ReadRange(target, start, stop))
            free_bytes -= (stop - start) * itemsize
            if free_bytes <= 0:
                yield batch
                batch, free_bytes = [], READ_BYTES
    if batch:
        yield batch


NUM_THREADS = 4
BATCH_BYTES = 16 * 2**20
BUFFER_BYTES = 2**20  # small enough to stay in cache between read and checksum


@dataclass(frozen=True, slots=True)
class _ChecksummedRange:
    file: TensorFile
    record: RangeRecord
    num_bytes: int


def verify_ranges(stored: StoredCheckpoint, share: int, num_shares: int) -> None:
    """Verify one share of the checksummed data. Not collective.

    Data without checksums, as in files of other programs, is skipped. Heads, index and param groups were verified when
    the checkpoint was opened. Other documents, such as a config that the user may edit, do not matter for a load.

    Args:
        stored: Open checkpoint.
        share: Index of the share, from 0.
        num_shares: Number of shares of about equal size.

    Raises:
        CheckpointError: Data differs from its checksum; the message names file and tensor.
    """
    batches = list(_batches_of_share(stored, share, num_shares))
    run_in_threads(lambda batch: _verify(stored, batch), batches, min(NUM_THREADS, len(batches)))


def _verify(stored: StoredCheckpoint, batch: Sequence[_ChecksummedRange]) -> None:
    reader, buffer = ElementReader(stored), np.empty(BUFFER_BYTES, dtype=np.uint8)
    for recorded in batch:
        record = recorded.record
        spec = stored.specs[record.name]
        box = full_box(spec.shape) if record.box is None else record.box
        itemsize = spec.dtype.itemsize
        step, found = BUFFER_BYTES // itemsize, 0
        for start in range(*record.span, step):
            stop = min(start + step, record.span[1])
            chunk = buffer[: (stop - start) * itemsize]
            reader.read(record.name, box, (start, stop), chunk)
            found = crc32(chunk.data, found)
        if found != record.crc32:
            where = "its own header" if stored.manifest is None else stored.path.name
            first, last = record.span
            raise CheckpointError(
                f"{recorded.file.path} is damaged: elements {first} to {last} of {record.name!r} have the checksum"
                f" {found:08x}, but {where} records {record.crc32:08x}, so nothing was loaded. Take another copy of the"
                ' checkpoint, or pass verify="structure" to load it as it is'
            )


def _batches_of_share(stored: StoredCheckpoint, share: int, num_shares: int) -> Iterator[list[_ChecksummedRange]]:
    """Yield the ranges whose first byte, counted over all ranges, is in the share, in batches for the threads."""
    recorded = [
        _ChecksummedRange(file, each, (each.span[1] - each.span[0]) * file.specs[each.name].dtype.itemsize)
        for file in stored.files
        if (record := stored.record_of(file)) is not None
        for each in record.ranges
    ]
    total, begin = sum(each.num_bytes for each in recorded), 0
    batch: list[_ChecksummedRange] = []
    free_bytes = BATCH_BYTES
    for each in recorded:
        if begin * num_shares // max(total, 1) == share:
            batch.append(each)
            free_bytes -= each.num_bytes
        begin += each.num_bytes
        if free_bytes <= 0:
            yield batch
            batch, free_bytes = [], BATCH_BYTES
    if batch:
        yield batch
