"""Verification of a checkpoint's checksums before it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from booster.checkpoint_io.formats.manifest import RangeRecord
from booster.checkpoint_io.formats.tensor_files import TensorFile
from booster.checkpoint_io.planning.slices import full_box
from booster.checkpoint_io.worker_threads import run_in_threads
from booster.errors import CheckpointError
from booster.kernels.checksum import crc32

from .ranges import ElementReader
from .reader import StoredCheckpoint

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
    batches = list(_batches(_share_of(stored, share, num_shares)))
    run_in_threads(_Verifier(stored).verify, batches, min(NUM_THREADS, len(batches)))


class _Verifier(threading.local):
    """Verifies ranges with one buffer per thread."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        self._reader = ElementReader(stored)
        self._buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)

    def verify(self, batch: Sequence[_ChecksummedRange]) -> None:
        for recorded in batch:
            record = recorded.record
            spec = self._stored.specs[record.name]
            box = full_box(spec.shape) if record.box is None else record.box
            itemsize = spec.dtype.itemsize
            step, found = BUFFER_BYTES // itemsize, 0
            for start in range(*record.span, step):
                stop = min(start + step, record.span[1])
                chunk = self._buffer[: (stop - start) * itemsize]
                self._reader.read(record.name, box, (start, stop), chunk)
                found = crc32(chunk.data, found)
            if found != record.crc32:
                where = "its own header" if self._stored.manifest is None else self._stored.path.name
                first, last = record.span
                raise CheckpointError(
                    f"{recorded.file.path} is damaged: elements {first} to {last} of {record.name!r} have the"
                    f" checksum {found:08x}, but {where} records {record.crc32:08x}, so nothing was loaded. Take"
                    ' another copy of the checkpoint, or pass verify="structure" to load it as it is'
                )


def _share_of(stored: StoredCheckpoint, share: int, num_shares: int) -> Iterator[_ChecksummedRange]:
    """Yield the ranges whose first byte, counted over all ranges, is in the share."""
    recorded = [
        _ChecksummedRange(file, each, (each.span[1] - each.span[0]) * file.specs[each.name].dtype.itemsize)
        for file in stored.files
        if (record := stored.record_of(file)) is not None
        for each in record.ranges
    ]
    total, begin = sum(each.num_bytes for each in recorded), 0
    for each in recorded:
        if begin * num_shares // max(total, 1) == share:
            yield each
        begin += each.num_bytes


def _batches(ranges: Iterator[_ChecksummedRange]) -> Iterator[list[_ChecksummedRange]]:
    batch: list[_ChecksummedRange] = []
    free_bytes = BATCH_BYTES
    for recorded in ranges:
        batch.append(recorded)
        free_bytes -= recorded.num_bytes
        if free_bytes <= 0:
            yield batch
            batch, free_bytes = [], BATCH_BYTES
    if batch:
        yield batch
