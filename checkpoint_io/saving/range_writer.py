"""Parallel writing of this rank's ranges into the files of a save, with checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from booster.checkpoint_io.copy_elements import copy_elements, needs_no_conversion, synchronize_devices
from booster.checkpoint_io.files.file_image import FileImage
from booster.checkpoint_io.files.tensor_bytes import bytes_of
from booster.checkpoint_io.planning.byte_runs import byte_runs, run_length, run_start
from booster.checkpoint_io.planning.plan import BLOCK_BYTES, WriteRange
from booster.checkpoint_io.saving.output_file import BufferedFileWriter, OutputFile
from booster.checkpoint_io.saving.staging import STAGING
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.checkpoint_io.worker_threads import run_in_threads
from booster.interface import TensorSlice
from booster.kernels.checksum import crc32

__all__ = ["read_range", "write_range_bytes", "write_ranges"]

# Note [Write jobs]
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
class _RangeWrite:
    """A range, its index in the result, the slice that holds it, and the file offset of its first byte."""

    index: int
    write_range: WriteRange
    source: TensorSlice
    offset: int

    @property
    def num_bytes(self) -> int:
        return (self.write_range.span[1] - self.write_range.span[0]) * self.source.dtype.itemsize


@dataclass(slots=True)
class _WriteJob:
    file: int
    block: int
    num_bytes: int = 0
    writes: list[_RangeWrite] = field(default_factory=list)


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
    is_pinned = synchronize_devices(slices[write_range.slice_index].tensor for write_range in ranges)
    outputs = _outputs(storage, files, jobs)

    def work(job: _WriteJob) -> None:
        output = outputs[job.file]
        output.open()
        with STAGING.borrow(is_pinned=is_pinned) as buffer:
            buffer_writer = BufferedFileWriter(output, buffer)
            for write in job.writes:
                checksums[write.index] = _write_range(output, buffer_writer, files[job.file][1], write)
            buffer_writer.flush()
        output.job_done()

    try:
        run_in_threads(work, jobs, min(num_threads, len(jobs)))
    finally:
        for output in outputs.values():
            output.close()
    return checksums


def read_range(source: TensorSlice, write_range: WriteRange, out: torch.Tensor) -> None:
    """Copy the bytes of a range, as stored in the file, from its slice.

    Args:
        source: Slice that contains the range.
        write_range: Range.
        out: CPU byte tensor of the range's size.
    """
    start = source.span[0]
    copy_elements(source.tensor, write_range.span[0] - start, write_range.span[1] - start, out, source.dtype)


def write_range_bytes(
    storage: Storage, file: OpenFile, image: FileImage, write_range: WriteRange, data: torch.Tensor
) -> int:
    """Write a range's bytes, as returned by `read_range`, to their file offsets and return their crc32.

    Args:
        storage: Storage of the file.
        file: File opened for writing; the caller syncs it.
        image: File image.
        write_range: Range.
        data: Bytes of the range, on the CPU.
    """
    view = bytes_of(data)
    spec = image.specs[write_range.name]
    for logical, local, length in _runs(spec.shape, write_range, write_range.span, spec.dtype.itemsize):
        storage.write_at(file, view[local : local + length], image.offsets[write_range.name] + logical)
    return crc32(view)


def _jobs(
    files: Sequence[tuple[Path, FileImage]], ranges: Sequence[WriteRange], slices: Sequence[TensorSlice]
) -> Iterator[_WriteJob]:
    """Group the ranges into jobs; see Note [Write jobs]."""
    job: _WriteJob | None = None
    for index, write_range in enumerate(ranges):
        if write_range.span[0] == write_range.span[1]:
            continue
        image, source = files[write_range.file][1], slices[write_range.slice_index]
        start = run_start(source.global_shape, write_range.box, write_range.span[0]) * source.dtype.itemsize
        write = _RangeWrite(index, write_range, source, image.offsets[write_range.name] + start)
        block = (write.offset - image.data_start) // BLOCK_BYTES
        if job is None or (job.file, job.block) != (write_range.file, block) or job.num_bytes >= BLOCK_BYTES:
            if job is not None:
                yield job
            job = _WriteJob(write_range.file, block)
        job.writes.append(write)
        job.num_bytes += write.num_bytes
    if job is not None:
        yield job


def _outputs(
    storage: Storage, files: Sequence[tuple[Path, FileImage]], jobs: Sequence[_WriteJob]
) -> dict[int, OutputFile]:
    jobs_of: dict[int, list[_WriteJob]] = {}
    for job in jobs:
        jobs_of.setdefault(job.file, []).append(job)
    return {
        file: OutputFile(
            storage,
            files[file][0],
            num_jobs=len(file_jobs),
            is_direct=sum(job.num_bytes for job in file_jobs) >= _MIN_DIRECT_BYTES,
        )
        for file, file_jobs in jobs_of.items()
    }


def _write_range(output: OutputFile, buffer_writer: BufferedFileWriter, image: FileImage, write: _RangeWrite) -> int:
    write_range, source = write.write_range, write.source
    itemsize = source.dtype.itemsize
    length = run_length(source.global_shape, write_range.box)
    if write_range.span[0] // length == (write_range.span[1] - 1) // length:
        return _write_run(buffer_writer, write.offset, source, write_range.span, 0)
    base = image.offsets[write_range.name]
    if length * itemsize < _LONG_RUN_BYTES:
        return _write_short_runs(output, buffer_writer, base, write)
    checksum = 0
    for logical, local, num_bytes in _runs(source.global_shape, write_range, write_range.span, itemsize):
        start = write_range.span[0] + local // itemsize
        checksum = _write_run(buffer_writer, base + logical, source, (start, start + num_bytes // itemsize), checksum)
    return checksum


def _write_run(
    buffer_writer: BufferedFileWriter, offset: int, source: TensorSlice, span: tuple[int, int], checksum: int
) -> int:
    """Write elements that are contiguous in the file through the buffer and return the updated checksum."""
    itemsize = source.dtype.itemsize
    start, stop = span
    while start < stop:
        target = buffer_writer.reserve(offset, (stop - start) * itemsize)
        count = target.numel() // itemsize
        copy_elements(source.tensor, start - source.span[0], start + count - source.span[0], target, source.dtype)
        checksum = crc32(bytes_of(target), checksum)
        start, offset = start + count, offset + count * itemsize
    return checksum


def _write_short_runs(output: OutputFile, buffer_writer: BufferedFileWriter, base: int, write: _RangeWrite) -> int:
    """Write a range that is scattered in the file, run by run, and return its checksum."""
    write_range, source = write.write_range, write.source
    itemsize = source.dtype.itemsize
    scratch = None if needs_no_conversion(source.tensor, source.dtype) else buffer_writer.scratch()
    step = write_range.span[1] - write_range.span[0] if scratch is None else scratch.numel() // itemsize
    checksum = 0
    for start in range(*write_range.span, step):
        stop = min(start + step, write_range.span[1])
        first, last = start - source.span[0], stop - source.span[0]
        if scratch is None:
            view = bytes_of(source.tensor.detach())[first * itemsize : last * itemsize]
        else:
            out = scratch[: (stop - start) * itemsize]
            copy_elements(source.tensor, first, last, out, source.dtype)
            view = bytes_of(out)
        checksum = crc32(view, checksum)
        for logical, local, num_bytes in _runs(source.global_shape, write_range, (start, stop), itemsize):
            output.write(view[local : local + num_bytes], base + logical)
    return checksum


def _runs(
    shape: tuple[int, ...], write_range: WriteRange, span: tuple[int, int], itemsize: int
) -> Iterator[tuple[int, int, int]]:
    """Yield offset in the tensor, offset in the span, and length of each run, in bytes."""
    for block in byte_runs(shape, write_range.box, span, itemsize):
        yield from zip(block.logical.tolist(), block.local.tolist(), block.length.tolist(), strict=True)
