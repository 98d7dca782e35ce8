"""Reading of elements in any box and span of a stored tensor, with few reads where they are many short runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from booster.checkpoint_io.copy_elements import copy_elements
from booster.checkpoint_io.planning.slices import Box, RunBlock, byte_runs, run_length, run_start
from booster.checkpoint_io.storage import OpenFile

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
