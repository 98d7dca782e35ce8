"""Parallel writing of this rank's ranges into the files of a save, with checksums.

Transfer of shards to writer ranks on other hosts: a file on a shared file system is written by one host only.

Network file systems cache pages per host, so two hosts that write into one page of a file lose each other's bytes. The
plan assigns every file to one host. Ranges held by other hosts are sent in messages of at most one staging buffer.

Note [Queue depth]
How many writes a disk needs in flight, and of which size, differs between disks: a local one has its full speed with
four writes of 8 MiB, one behind a network or many together need more. So the first large save to a disk writes a part
of its bytes with each number of threads, and the rest, as all later saves of the process, with the fastest. The memory
is the same: the buffers of more threads are smaller.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from booster.checkpoint_io.copy_elements import bytes_of, copy_elements, needs_no_conversion, synchronize_devices
from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.parallel import run_in_threads
from booster.checkpoint_io.planning.save_plan import BLOCK_BYTES, SavePlan, WriteRange
from booster.checkpoint_io.planning.slices import byte_runs, run_length, run_start
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.comm import fake, offloaded_memory, receive, send
from booster.interface import TensorSlice
from booster.kernels.checksum import crc32
from booster.kernels.disk_io import aligned_buffer

from .part import FileImage

if TYPE_CHECKING:
    from typing_extensions import Buffer

# O_DIRECT avoids a copy into the page cache and the flush at fsync, but requires full pages. So a file is open twice:
# full pages are written with O_DIRECT, the unaligned edges through the page cache. No page is written both ways: a page
# is written with O_DIRECT only if all of it belongs to one thread; a page shared by two threads or ranks goes through
# the cache in both. One fsync covers both. A file system without O_DIRECT returns EINVAL on open or on write; then all
# data goes through the cache.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(slots=True, eq=False)
class _OutputFile:
    """File that already exists in full size."""

    _storage: Storage
    _path: Path
    _num_jobs: int  # that are still to write into it
    _is_direct: bool  # whether to try O_DIRECT
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _cached: OpenFile | None = field(default=None, init=False)
    _direct: OpenFile | None = field(default=None, init=False)

    @contextmanager
    def job(self) -> Iterator[None]:
        """Context of one job: the first one opens the file, the last one that succeeds syncs and closes it."""
        with self._lock:
            if self._cached is None:
                self._cached = self._storage.open_for_writing(self._path)
                if self._is_direct:
                    try:
                        self._direct = self._storage.open_for_writing(self._path, direct=True)
                    except OSError as error:
                        if error.errno not in _UNSUPPORTED:
                            raise
                        self._is_direct = False
        yield
        with self._lock:
            self._num_jobs -= 1
            if self._num_jobs > 0 or self._cached is None:
                return
        self._storage.sync(self._cached)
        self.close()

    def write(self, data: Buffer, offset: int) -> None:
        """Write bytes at any offset."""
        assert self._cached is not None, f"{self._path} is not open"
        self._storage.write_at(self._cached, data, offset)

    def write_pages(self, data: Buffer, offset: int) -> None:
        """Write full pages from page-aligned memory."""
        if self._is_direct and self._direct is not None:
            try:
                self._storage.write_at(self._direct, data, offset)
                return
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._is_direct = False
        self.write(data, offset)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            opened = [file for file in (self._cached, self._direct) if file is not None]
            self._cached = self._direct = None
        for file in opened:
            self._storage.close(file)


@dataclass(slots=True, eq=False)
class _BufferedFileWriter:
    """Staging buffer over a file: collects bytes in file order and writes them when it is full."""

    _file: _OutputFile
    _buffer: torch.Tensor  # its first byte maps to a page boundary of the file
    # Buffered range, as file offsets.
    _start: int = field(default=0, init=False)
    _stop: int = field(default=0, init=False)

    def reserve(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return buffer memory for the bytes at file offset `offset`; the caller fills it before the next call.

        The result may be smaller than requested.
        """
        base = self._start // PAGE_BYTES * PAGE_BYTES
        if offset != self._stop or offset - base == self._buffer.numel():
            self.flush()
            self._start = self._stop = offset
            base = offset // PAGE_BYTES * PAGE_BYTES
        target = self._buffer[offset - base : offset - base + num_bytes]
        self._stop += target.numel()
        return target

    def scratch(self) -> torch.Tensor:
        """Return the full buffer for other use until the next call."""
        self.flush()
        return self._buffer

    def flush(self) -> None:
        """Write the buffered bytes: full pages in one call, then the edges."""
        start, stop, buffered = self._start, self._stop, bytes_of(self._buffer)
        base = start // PAGE_BYTES * PAGE_BYTES
        self._start = self._stop = 0
        first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        if first >= last:
            first = last = stop
        if start < first:
            self._file.write(buffered[start - base : first - base], start)
        if first < last:
            self._file.write_pages(buffered[first - base : last - base], first)
        if last < stop:
            self._file.write(buffered[last - base : stop - base], last)


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor | None = None
    is_pinned: bool = False  # as requested: not every accelerator supports pinned memory


class StagingBuffers:
    """Pool of aligned buffers for threads. Memory is allocated on first use and kept.

    All concurrent saves of the process share the pool, which bounds the memory.

    Args:
        count: Number of buffers.
        num_bytes: Size of each, a multiple of `PAGE_BYTES`.
    """

    def __init__(self, count: int, num_bytes: int) -> None:
        self.count = count
        self.num_bytes = num_bytes
        self._idle = LifoQueue[_Buffer]()
        for _ in range(count):
            self._idle.put(_Buffer())

    @contextmanager
    def borrow(self, *, is_pinned: bool = False) -> Iterator[torch.Tensor]:
        """Borrow a buffer, waiting until one is free. A thread must not hold two.

        Args:
            is_pinned: Whether an accelerator will write into it.
        """
        if fake.replicas is not None:  # each thread has its own: what is kept for the process does not count
            yield host_memory(self.num_bytes, is_pinned=is_pinned)
            return
        buffer = self._idle.get()
        try:
            if buffer.memory is None or (is_pinned and not buffer.is_pinned):
                buffer.memory = None  # free the old memory before allocating the new one
                buffer.memory = (
                    host_memory(self.num_bytes, is_pinned=True) if is_pinned else aligned_buffer(self.num_bytes)
                )
                buffer.is_pinned = is_pinned
            yield buffer.memory
        finally:
            self._idle.put(buffer)


def host_memory(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Allocate host memory at a multiple of `PAGE_BYTES`.

    Args:
        num_bytes: Size, at least 1.
        is_pinned: If True, pin the memory where the accelerator supports it.
    """
    if fake.replicas is not None:
        with offloaded_memory():  # never a device's memory, on a host without accelerator too
            return torch.empty(num_bytes, dtype=torch.uint8)
    if is_pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)  # page-aligned by the driver
        except RuntimeError:  # pinned memory is unsupported or exhausted: copies are slower, but correct
            return host_memory(num_bytes, is_pinned=False)
    # Shared mapping: private memory would be copied on the first write after a fork.
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


# Four threads keep the disk busy while some of them copy. On an idle machine a quarter of this memory would do; the
# rest hides delays when a thread waits for a core.
_DEFAULT_DEPTH = 4
_staging = StagingBuffers(count=_DEFAULT_DEPTH, num_bytes=8 * 2**20)

_DEPTHS = (2, 4, 8)  # numbers of threads
_SAMPLE_BYTES = 384 * 2**20  # that are written with each
_LEAST_GAIN = 1.1  # of another depth than the default
_depth_of: dict[int, int] = {}  # by the number of the file system's device
_measuring = threading.Lock()


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


@dataclass(slots=True)
class _WriteJob:
    path: Path
    image: FileImage
    block: int
    checksums: list[int]  # of all ranges of the part
    num_bytes: int = 0
    writes: list[_RangeWrite] = field(default_factory=list)


Slices: TypeAlias = Sequence[TensorSlice] | Callable[[WriteRange], TensorSlice]


@dataclass(frozen=True, slots=True)
class PartWrites:
    """What this rank writes of one part of a checkpoint.

    Attributes:
        files: Paths and images of the plan's files, already created in full size.
        ranges: Ranges to write; file order is fastest.
        slices: This rank's slices, by `slice_index`, or a function that returns the copy of a range.
    """

    files: Sequence[tuple[Path, FileImage]]
    ranges: Sequence[WriteRange]
    slices: Slices


def write_ranges(storage: Storage, parts: Sequence[PartWrites], *, num_threads: int | None = None) -> list[list[int]]:
    """Write this rank's ranges and wait until they are on disk.

    Memory: the buffers of `_staging`, for any model size. Collective: no.

    Args:
        storage: Storage to write to.
        parts: Ranges of every part of the checkpoint: while one file is synced, the next is being written.
        num_threads: Number of writer threads, optional; defaults to the disk's, see Note [Queue depth].

    Returns:
        By part, the crc32 of each range's bytes, in the order of its ranges.

    Raises:
        OSError: Writing failed in some thread; all threads have ended.
    """
    checksums = [[0] * len(part.ranges) for part in parts]
    jobs = [job for part, of_part in zip(parts, checksums, strict=True) for job in _jobs(part, of_part)]
    is_pinned = synchronize_devices(write.source.tensor for job in jobs for write in job.writes)
    jobs_of: dict[Path, list[_WriteJob]] = {}
    for job in jobs:
        jobs_of.setdefault(job.path, []).append(job)
    outputs: dict[Path, _OutputFile] = {}
    for path, file_jobs in jobs_of.items():
        is_direct = sum(job.num_bytes for job in file_jobs) >= _MIN_DIRECT_BYTES
        outputs[path] = _OutputFile(storage, path, len(file_jobs), is_direct)

    def work(job: _WriteJob) -> None:
        output = outputs[job.path]
        with output.job(), _staging.borrow(is_pinned=is_pinned) as buffer:
            buffer_writer = _BufferedFileWriter(output, buffer)
            for write in job.writes:
                job.checksums[write.index] = _write_range(output, buffer_writer, job.image, write)
            buffer_writer.flush()

    try:
        is_large = sum(job.num_bytes for job in jobs) >= 2 * _SAMPLE_BYTES * len(_DEPTHS)
        if num_threads is None and fake.replicas is None and (is_large or (jobs and _depth_of)):
            _run_at_best_depth(work, jobs, storage.device_of(jobs[0].path), measures=is_large)
        else:
            run_in_threads(work, jobs, min(num_threads or _staging.count, len(jobs)))
    finally:
        for output in outputs.values():
            output.close()
    return checksums


def _run_at_best_depth(
    work: Callable[[_WriteJob], None], jobs: Sequence[_WriteJob], device: int, *, measures: bool
) -> None:
    """Run write jobs in as many threads as the disk needs; see Note [Queue depth]. Raises as `run_in_threads` does.

    Args:
        work: Function that runs one job and borrows one staging buffer for it.
        jobs: Jobs, at least one.
        device: Number of the device that is written to.
        measures: Whether there are enough bytes to measure a disk that is unknown.
    """
    if measures and device not in _depth_of and _measuring.acquire(blocking=False):
        try:
            jobs = _measure_depth(work, jobs, device)
        finally:
            _use_depth(_DEFAULT_DEPTH)  # a failure leaves no other one
            _measuring.release()
    depth = _depth_of.get(device, _DEFAULT_DEPTH)
    _use_depth(depth)
    run_in_threads(work, jobs, min(depth, len(jobs)))


def _use_depth(count: int) -> None:
    """Divide the staging memory into this number of buffers; those that are borrowed now are freed when returned."""
    global _staging
    staging = _staging
    if count != staging.count:
        num_bytes = staging.count * staging.num_bytes // count
        _staging = StagingBuffers(count, num_bytes // PAGE_BYTES * PAGE_BYTES)


def _measure_depth(work: Callable[[_WriteJob], None], jobs: Sequence[_WriteJob], device: int) -> Sequence[_WriteJob]:
    """Run some jobs at each depth and note the fastest; return the other jobs."""
    speeds: dict[int, float] = {}
    for depth in _DEPTHS:
        ends = accumulate(job.num_bytes for job in jobs)
        count = 1 + next(index for index, end in enumerate(ends) if end >= _SAMPLE_BYTES)
        sample, jobs = jobs[:count], jobs[count:]
        _use_depth(depth)
        start = time.perf_counter()
        run_in_threads(work, sample, depth)
        speeds[depth] = sum(job.num_bytes for job in sample) / (time.perf_counter() - start)
    fastest = max(speeds, key=speeds.__getitem__)
    _depth_of[device] = fastest if speeds[fastest] >= _LEAST_GAIN * speeds[_DEFAULT_DEPTH] else _DEFAULT_DEPTH
    return jobs


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


def _jobs(part: PartWrites, checksums: list[int]) -> Iterator[_WriteJob]:
    """Group the ranges into jobs; see Note [Write jobs]."""
    job: _WriteJob | None = None
    slices = part.slices
    for index, write_range in enumerate(part.ranges):
        if write_range.span[0] == write_range.span[1]:
            continue
        path, image = part.files[write_range.file]
        source = slices[write_range.slice_index] if isinstance(slices, Sequence) else slices(write_range)
        start = run_start(source.global_shape, write_range.box, write_range.span[0]) * source.dtype.itemsize
        write = _RangeWrite(index, write_range, source, image.offsets[write_range.name] + start)
        block = (write.offset - image.data_start) // BLOCK_BYTES
        if job is None or (job.path, job.block) != (path, block) or job.num_bytes >= BLOCK_BYTES:
            if job is not None:
                yield job
            job = _WriteJob(path, image, block, checksums)
        job.writes.append(write)
        job.num_bytes += (write_range.span[1] - write_range.span[0]) * source.dtype.itemsize
    if job is not None:
        yield job


def _write_range(output: _OutputFile, buffer_writer: _BufferedFileWriter, image: FileImage, write: _RangeWrite) -> int:
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
    buffer_writer: _BufferedFileWriter, offset: int, source: TensorSlice, span: tuple[int, int], checksum: int
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


def _write_short_runs(output: _OutputFile, buffer_writer: _BufferedFileWriter, base: int, write: _RangeWrite) -> int:
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


class Relay:
    """Point-to-point transfer of ranges from the ranks that hold them to the ranks that write them.

    Args:
        group: Dedicated gloo group, so that it can run concurrently with the training's collectives.
        rank: Rank of this process in the group.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def exchange(
        self,
        storage: Storage,
        plan: SavePlan,
        files: Sequence[tuple[Path, FileImage]],
        slices: Slices,
    ) -> tuple[dict[WriteRange, int], OSError | None]:
        """Send this rank's ranges to their writers, and write the ranges of other ranks.

        Every rank iterates over the same list in the same order, so there is no deadlock, also where a write fails.

        Returns:
            The checksums of what was written for other ranks, and the first failure of a write.
        """
        written: dict[WriteRange, int] = {}
        failure: OSError | None = None
        touched: set[Path] = set()
        for write_range in plan.ranges():
            if write_range.owner == write_range.writer:
                continue
            num_bytes = (write_range.span[1] - write_range.span[0]) * plan.specs[write_range.name].dtype.itemsize
            if write_range.owner == self._rank:
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
                source = slices[write_range.slice_index] if isinstance(slices, Sequence) else slices(write_range)
                read_range(source, write_range, buffer)
                send(buffer, write_range.writer, self._group)
            elif write_range.writer == self._rank:
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
                receive(buffer, write_range.owner, self._group)
                path, image = files[write_range.file]
                written[write_range] = 0
                try:
                    with storage.open_for_writing(path) as file:
                        written[write_range] = write_range_bytes(storage, file, image, write_range, buffer)
                except OSError as error:
                    failure = failure or error
                touched.add(path)
        try:
            for path in sorted(touched):
                storage.sync_path(path)
        except OSError as error:
            failure = failure or error
        return written, failure
