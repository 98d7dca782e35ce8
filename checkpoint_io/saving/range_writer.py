"""Parallel writing of this rank's ranges into the files of a save, with checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from booster.checkpoint_io.copy_elements import copy_elements, is_plain, wait_for_devices
from booster.checkpoint_io.files.file_image import FileImage
from booster.checkpoint_io.files.tensor_bytes import bytes_of
from booster.checkpoint_io.planning.byte_runs import byte_runs, run_length, run_start
from booster.checkpoint_io.planning.plan import BLOCK_BYTES, WriteRange
from booster.checkpoint_io.saving.output_file import OutputFile, Window
from booster.checkpoint_io.saving.staging import STAGING
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.checkpoint_io.worker_threads import run_in_threads
from booster.interface import TensorSlice
from booster.kernels.checksum import crc32

__all__ = ["read_range", "write_one", "write_ranges"]

# Note [Jobs]
# A job is a contiguous part of a file of about one block, split where the plan splits ranges: at a page, where the file
# allows it. A thread takes a job, copies its elements through a staging buffer, computes the checksum and writes. While
# the disk works for one thread, the others copy. Copies, checksums and writes all release the GIL.
# Checksums: the compiled kernel computes the same crc32 as zlib, so files do not depend on it: a machine without the
# kernel verifies the same files. Data is checksummed while it is in cache; short heads use zlib.

# Shorter runs are written one by one through the page cache, straight from the tensor if possible. A file of which this
# rank writes less than `_MIN_DIRECT_BYTES` is not opened with O_DIRECT.
_LONG_RUN_BYTES = 2**18
_MIN_DIRECT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range, its index in the result, the slice that holds it, and the file offset of its first byte."""

    index: int
    part: WriteRange
    held: TensorSlice
    offset: int

    @property
    def num_bytes(self) -> int:
        return (self.part.span[1] - self.part.span[0]) * self.held.dtype.itemsize


@dataclass(slots=True)
class _Job:
    file: int
    block: int
    num_bytes: int = 0
    pieces: list[_Piece] = field(default_factory=list)


def write_ranges(
    storage: Storage,
    files: Sequence[tuple[Path, FileImage]],
    ranges: Sequence[WriteRange],
    slices: Sequence[TensorSlice],
    *,
    num_threads: int = STAGING.count,
) -> list[int]:
    """Write this rank's ranges and wait until they are on disk.

    Memory: the buffers of `STAGING`, for any model size. Collective: no.

    Args:
        storage: Storage to write to.
        files: Paths and images of the plan's files, already created in full size.
        ranges: Ranges to write; file order is fastest.
        slices: This rank's slices, indexed by the ranges' `slice_index`.
        num_threads: Number of writer threads.

    Returns:
        The crc32 of each range's bytes, in the order of `ranges`.

    Raises:
        OSError: Writing failed in some thread; all threads have ended.
    """
    checksums = [0] * len(ranges)
    jobs = list(_jobs(files, ranges, slices))
    is_pinned = wait_for_devices(slices[part.slice_index].tensor for part in ranges)
    outputs = _outputs(storage, files, jobs)

    def work(job: _Job) -> None:
        output = outputs[job.file]
        output.open()
        with STAGING.borrow(is_pinned=is_pinned) as buffer:
            window = Window(output, buffer)
            for piece in job.pieces:
                checksums[piece.index] = _write_piece(output, window, files[job.file][1], piece)
            window.flush()
        output.job_done()

    try:
        run_in_threads(work, jobs, min(num_threads, len(jobs)))
    finally:
        for output in outputs.values():
            output.close()
    return checksums


def read_range(held: TensorSlice, part: WriteRange, out: torch.Tensor) -> None:
    """Copy the bytes of a range, as stored in the file, from its slice.

    Args:
        held: Slice that contains the range.
        part: Range.
        out: CPU byte tensor of the range's size.
    """
    start = held.span[0]
    copy_elements(held.tensor, part.span[0] - start, part.span[1] - start, out, held.dtype)


def write_one(storage: Storage, file: OpenFile, image: FileImage, part: WriteRange, data: torch.Tensor) -> int:
    """Write a range's bytes, as returned by `read_range`, to their file offsets and return their crc32.

    Args:
        storage: Storage of the file.
        file: File opened for writing; the caller syncs it.
        image: File image.
        part: Range.
        data: Bytes of the range, on the CPU.
    """
    view = bytes_of(data)
    spec = image.specs[part.name]
    for logical, local, length in _runs(spec.shape, part, part.span, spec.dtype.itemsize):
        storage.write_at(file, view[local : local + length], image.offsets[part.name] + logical)
    return crc32(view)


def _jobs(
    files: Sequence[tuple[Path, FileImage]], ranges: Sequence[WriteRange], slices: Sequence[TensorSlice]
) -> Iterator[_Job]:
    """Group the ranges into jobs; see Note [Jobs]."""
    job: _Job | None = None
    for index, part in enumerate(ranges):
        if part.span[0] == part.span[1]:
            continue
        image, held = files[part.file][1], slices[part.slice_index]
        start = run_start(held.global_shape, part.box, part.span[0]) * held.dtype.itemsize
        piece = _Piece(index, part, held, image.offsets[part.name] + start)
        block = (piece.offset - image.data_start) // BLOCK_BYTES
        if job is None or (job.file, job.block) != (part.file, block) or job.num_bytes >= BLOCK_BYTES:
            if job is not None:
                yield job
            job = _Job(part.file, block)
        job.pieces.append(piece)
        job.num_bytes += piece.num_bytes
    if job is not None:
        yield job


def _outputs(storage: Storage, files: Sequence[tuple[Path, FileImage]], jobs: Sequence[_Job]) -> dict[int, OutputFile]:
    jobs_of: dict[int, list[_Job]] = {}
    for job in jobs:
        jobs_of.setdefault(job.file, []).append(job)
    return {
        file: OutputFile(
            storage,
            files[file][0],
            num_jobs=len(own),
            is_direct=sum(job.num_bytes for job in own) >= _MIN_DIRECT_BYTES,
        )
        for file, own in jobs_of.items()
    }


def _write_piece(output: OutputFile, window: Window, image: FileImage, piece: _Piece) -> int:
    part, held = piece.part, piece.held
    itemsize = held.dtype.itemsize
    length = run_length(held.global_shape, part.box)
    if part.span[0] // length == (part.span[1] - 1) // length:
        return _write_run(window, piece.offset, held, part.span, 0)
    base = image.offsets[part.name]
    if length * itemsize < _LONG_RUN_BYTES:
        return _write_short_runs(output, window, base, piece)
    checksum = 0
    for logical, local, num_bytes in _runs(held.global_shape, part, part.span, itemsize):
        start = part.span[0] + local // itemsize
        checksum = _write_run(window, base + logical, held, (start, start + num_bytes // itemsize), checksum)
    return checksum


def _write_run(window: Window, offset: int, held: TensorSlice, span: tuple[int, int], checksum: int) -> int:
    """Write elements that are contiguous in the file through the buffer and return the updated checksum."""
    itemsize = held.dtype.itemsize
    start, stop = span
    while start < stop:
        room = window.reserve(offset, (stop - start) * itemsize)
        count = room.numel() // itemsize
        copy_elements(held.tensor, start - held.span[0], start + count - held.span[0], room, held.dtype)
        checksum = crc32(bytes_of(room), checksum)
        start, offset = start + count, offset + count * itemsize
    return checksum


def _write_short_runs(output: OutputFile, window: Window, base: int, piece: _Piece) -> int:
    """Write a range that is scattered in the file, run by run, and return its checksum."""
    part, held = piece.part, piece.held
    itemsize = held.dtype.itemsize
    scratch = None if is_plain(held.tensor, held.dtype) else window.scratch()
    step = part.span[1] - part.span[0] if scratch is None else scratch.numel() // itemsize
    checksum = 0
    for start in range(*part.span, step):
        stop = min(start + step, part.span[1])
        first, last = start - held.span[0], stop - held.span[0]
        if scratch is None:
            view = bytes_of(held.tensor.detach())[first * itemsize : last * itemsize]
        else:
            out = scratch[: (stop - start) * itemsize]
            copy_elements(held.tensor, first, last, out, held.dtype)
            view = bytes_of(out)
        checksum = crc32(view, checksum)
        for logical, local, num_bytes in _runs(held.global_shape, part, (start, stop), itemsize):
            output.write(view[local : local + num_bytes], base + logical)
    return checksum


def _runs(
    shape: tuple[int, ...], part: WriteRange, span: tuple[int, int], itemsize: int
) -> Iterator[tuple[int, int, int]]:
    """Yield offset in the tensor, offset in the span, and length of each run, in bytes."""
    for block in byte_runs(shape, part.box, span, itemsize):
        yield from zip(block.logical.tolist(), block.local.tolist(), block.length.tolist(), strict=True)
