"""Writes this rank's pieces of tensors to their places in the files of a save, and returns their checksums."""

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
# A job is a stretch of a file of about one block, cut where the plan cuts ranges: on a page, where the file allows it.
# A thread takes a job, copies its elements through a buffer of its own, sums them on the way, and writes; while the
# disk works for one thread, the others copy. All the heavy parts let go of the interpreter's lock.

# Note [Checksums]
# The kernel's crc32 is the number that zlib gives, so the manifest's format does not know of it: a machine that has to
# do without verifies the same files. Bytes are summed while they are in the cache, and short heads by zlib itself.

# Shorter runs are written one by one through the page cache, straight from the tensor where it can be; longer ones are
# worth whole pages. A file that this rank writes less of than that is not opened for whole pages.
_LONG_RUN_BYTES = 2**18
_MIN_DIRECT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range, its place in the result, the slice that holds it, and where its first byte goes in the file."""

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
    """Writes ranges that this rank holds, and waits until they are on the disk.

    Memory: the buffers of `STAGING`, whatever the model's size. Collective: no.

    Args:
        storage: Where to write.
        files: The plan's files, which another rank has created in their full size, and their images.
        ranges: What to write, in the order of the files for the best speed.
        slices: This rank's slices, by the ranges' `slice_index`.
        num_threads: How many threads write.

    Returns:
        The crc32 of each range's bytes, in the order of the ranges.

    Raises:
        OSError: Writing failed, in whichever thread; all of them have ended.
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
    """Copies a range's bytes, as the file holds them, from the slice it is a piece of.

    Args:
        held: The slice.
        part: The range.
        out: Bytes on the CPU, as many as the range has.
    """
    start = held.span[0]
    copy_elements(held.tensor, part.span[0] - start, part.span[1] - start, out, held.dtype)


def write_one(storage: Storage, file: OpenFile, image: FileImage, part: WriteRange, data: torch.Tensor) -> int:
    """Writes a range's bytes, which `read_range` gave, to their places, and returns their crc32.

    Args:
        storage: Where the file is.
        file: The file, open for writing; the caller syncs it.
        image: What it looks like.
        part: The range.
        data: Its bytes, on the CPU.
    """
    view = bytes_of(data)
    spec = image.specs[part.name]
    for logical, local, length in _runs(spec.shape, part, part.span, spec.dtype.itemsize):
        storage.write_at(file, view[local : local + length], image.offsets[part.name] + logical)
    return crc32(view)


def _jobs(
    files: Sequence[tuple[Path, FileImage]], ranges: Sequence[WriteRange], slices: Sequence[TensorSlice]
) -> Iterator[_Job]:
    """Yields the ranges in jobs; see Note [Jobs]."""
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
    """Writes elements that follow each other in the file, through the window, and returns the sum with them."""
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
    """Writes a range that lies scattered in the file, run by run, and returns its sum."""
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
    """Yields offset in the tensor, offset in the span, and length of each run of bytes."""
    for block in byte_runs(shape, part.box, span, itemsize):
        yield from zip(block.logical.tolist(), block.local.tolist(), block.length.tolist(), strict=True)
