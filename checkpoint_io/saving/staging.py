"""Staging buffers of the writer threads, in the number and the size that the disk needs.

Note [Depth]
How many writes a disk needs in flight, and of which size, differs between disks: a local one has its full speed with
four writes of 8 MiB, one behind a network or many together need more. So the first large save to a disk writes a part
of its bytes with each number of threads, and the rest, as all later saves of the process, with the fastest. The memory
is the same: the buffers of more threads are smaller.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from queue import LifoQueue
from typing import Protocol, TypeVar

import torch

from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.parallel import run_in_threads
from booster.comm import fake, offloaded_memory
from booster.kernels.disk_io import aligned_buffer

_DEPTHS = (2, 4, 8)  # numbers of threads
_SAMPLE_BYTES = 384 * 2**20  # that are written with each
_LEAST_GAIN = 1.1  # of another depth than the default


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor | None = None
    is_pinned: bool = False  # as requested: not every accelerator supports pinned memory


class _Pool:
    def __init__(self, count: int, num_bytes: int) -> None:
        self.count = count
        self.num_bytes = num_bytes
        self.idle = LifoQueue[_Buffer]()
        for _ in range(count):
            self.idle.put(_Buffer())


class StagingBuffers:
    """Pool of aligned buffers for threads. Memory is allocated on first use and kept.

    All concurrent saves of the process share the pool, which bounds the memory.

    Args:
        count: Number of buffers.
        num_bytes: Size of each, a multiple of `PAGE_BYTES`.

    Attributes:
        default_count: Number of buffers where nothing is known of the disk.
    """

    def __init__(self, count: int, num_bytes: int) -> None:
        self.default_count = count
        self._total = count * num_bytes
        self._pool = _Pool(count, num_bytes)

    @property
    def count(self) -> int:
        """Number of buffers."""
        return self._pool.count

    @property
    def num_bytes(self) -> int:
        """Size of each."""
        return self._pool.num_bytes

    def set_count(self, count: int) -> None:
        """Divide the pool's memory into this number of buffers; those that are borrowed now are freed when returned."""
        if count != self.count:
            self._pool = _Pool(count, self._total // count // PAGE_BYTES * PAGE_BYTES)

    @contextmanager
    def borrow(self, *, is_pinned: bool = False) -> Iterator[torch.Tensor]:
        """Borrow a buffer, waiting until one is free. A thread must not hold two.

        Args:
            is_pinned: Whether an accelerator will write into it.
        """
        pool = self._pool
        if fake.replicas is not None:  # each thread has its own: what is kept for the process does not count
            yield host_memory(pool.num_bytes, is_pinned=is_pinned)
            return
        buffer = pool.idle.get()
        try:
            if buffer.memory is None or (is_pinned and not buffer.is_pinned):
                buffer.memory = None  # free the old memory before allocating the new one
                buffer.memory = (
                    host_memory(pool.num_bytes, is_pinned=True) if is_pinned else aligned_buffer(pool.num_bytes)
                )
                buffer.is_pinned = is_pinned
            yield buffer.memory
        finally:
            pool.idle.put(buffer)


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
STAGING = StagingBuffers(count=4, num_bytes=8 * 2**20)

_depth_of: dict[int, int] = {}  # by the number of the file system's device
_measuring = threading.Lock()


class _Sized(Protocol):
    num_bytes: int


Job = TypeVar("Job", bound=_Sized)


def run_at_best_depth(
    work: Callable[[Job], None],
    jobs: Sequence[Job],
    device: int,
    staging: StagingBuffers,
    num_threads: int | None = None,
) -> None:
    """Run write jobs in as many threads as the disk needs; see Note [Depth]. Raises as `run_in_threads` does.

    Args:
        work: Function that runs one job and borrows one buffer of `staging` for it.
        jobs: Jobs.
        device: Number of the device that is written to.
        staging: Buffers, which are divided among the threads.
        num_threads: Number of threads, optional; then nothing is measured.
    """
    if num_threads is None:
        is_large = sum(job.num_bytes for job in jobs) >= 2 * _SAMPLE_BYTES * len(_DEPTHS)
        if is_large and device not in _depth_of and fake.replicas is None and _measuring.acquire(blocking=False):
            try:
                jobs = _measure_depth(work, jobs, device, staging)
            finally:
                _measuring.release()
        num_threads = _depth_of.get(device, staging.default_count)
        staging.set_count(num_threads)
    run_in_threads(work, jobs, min(num_threads, len(jobs)))


def _measure_depth(
    work: Callable[[Job], None], jobs: Sequence[Job], device: int, staging: StagingBuffers
) -> Sequence[Job]:
    """Run some jobs at each depth and note the fastest; return the other jobs."""
    speeds: dict[int, float] = {}
    for depth in _DEPTHS:
        ends = accumulate(job.num_bytes for job in jobs)
        count = 1 + next(index for index, end in enumerate(ends) if end >= _SAMPLE_BYTES)
        sample, jobs = jobs[:count], jobs[count:]
        staging.set_count(depth)
        start = time.perf_counter()
        run_in_threads(work, sample, depth)
        speeds[depth] = sum(job.num_bytes for job in sample) / (time.perf_counter() - start)
    fastest, default = max(speeds, key=speeds.__getitem__), staging.default_count
    _depth_of[device] = fastest if speeds[fastest] >= _LEAST_GAIN * speeds[default] else default
    return jobs
