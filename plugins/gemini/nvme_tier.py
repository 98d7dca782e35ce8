"""Disk tier: blocks in one file of this process."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from booster.errors import ConfigError
from booster.kernels.disk_io import ALIGNMENT, DiskQueue, IOTicket, aligned_buffer, open_data_file, reserve_space
from booster.optim.nvme_offload.directory import ScratchDirectory
from booster.plugins.sharding.pinned_memory import FreeList

from .tiers import Direction, TierBlock, Transfer, bytes_of

# Requests bypass the page cache (direct I/O, O_DIRECT) if the file system supports it, or else use it (cached I/O).
# The kernel keeps the two coherent in sequence, but not concurrently: the cache writes back pages in groups, so that a
# page that was changed through a mapping may be written together with stale neighbours, over the data of a concurrent
# direct write. So all requests in flight use the same mode, and a switch waits for them. Cached I/O is used if the file
# does not support O_DIRECT, while a tensor maps the file, and for unaligned tensors in memory.
#
# Direct I/O moves full pages. The tail of a tensor goes through a bounce buffer, and so do small unaligned tensors.
_BOUNCE_BUFFER_BYTES = 64 << 10


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTransfer:
    """Read or write of a block: its requests, and the bounce buffer of the tail of a read.

    Attributes:
        error: First error of a request, set by `settle`.
    """

    def __init__(
        self, tickets: Sequence[IOTicket], *, end: tuple[Tensor, Tensor] | None = None, error: OSError | None = None
    ) -> None:
        self.error = error
        self._tickets = tickets
        self._end = end

    def is_done(self) -> bool:
        """Return True if `settle` would not block."""
        return all(ticket.done() for ticket in self._tickets)

    def settle(self) -> None:
        """Wait until no request is in flight, without raising errors."""
        for ticket in self._tickets:
            try:
                ticket.wait()
            except OSError as error:
                self.error = self.error or error  # raised by `wait`, after all requests have finished

    def wait(self) -> None:
        """Wait, and copy the tail of a read from its bounce buffer. Idempotent.

        Raises:
            OSError: A request failed.
        """
        self.settle()
        end, self._end = self._end, None
        if self.error is not None:
            raise self.error.with_traceback(None)
        if end is not None:
            into, page = end
            into.copy_(page[: into.numel()])


class BlockFile:
    """File of a disk tier, with its free list and the requests in flight.

    Args:
        path: Path of the file, which is created.
        queue: Queue of the requests. It is closed before the file.
    """

    def __init__(self, path: Path, queue: DiskQueue) -> None:
        self._path = path
        self._queue = queue
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        # One page, to probe for O_DIRECT.
        self._direct, self._is_direct = open_data_file(path, ALIGNMENT)
        self._cached = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._is_cached_way = not self._is_direct
        self._in_flight: deque[DiskTransfer] = deque()
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._end = 0
        self._free_list = FreeList()

    def allocate(self, num_bytes: int) -> tuple[int, bool]:
        """Reserve full pages; return their offset and whether they are known to be zero."""
        with self._open():
            offset = self._free_list.allocate(num_bytes)
            if offset is not None:
                return offset, False
            offset = self._end
            self._grow(num_bytes)
            return offset, True

    def free(self, extent: tuple[int, int]) -> None:
        """Free pages (offset and number of bytes). Safe to call during a garbage collection."""
        self._free_list.freed.append(extent)

    def read(self, data: Tensor, offset: int) -> DiskTransfer:
        """Start a read at an offset into `data`."""
        return self._start(self._queue.read, data, offset, reads=True)

    def write(self, data: Tensor, offset: int) -> DiskTransfer:
        """Start a write of `data` at an offset."""
        return self._start(self._queue.write, data, offset, reads=False)

    def _start(
        self, request: Callable[[int, Tensor, int], IOTicket], data: Tensor, offset: int, *, reads: bool
    ) -> DiskTransfer:
        with self._open():
            num_direct = self._choose_way(data)
            if self._is_cached_way:
                transfer = DiskTransfer([request(self._cached, data, offset)])
            else:
                tickets = [request(self._direct, data[:num_direct], offset)] if num_direct else []
                end, page = data[num_direct:], None
                if end.numel():
                    page = aligned_buffer(whole_pages(end.numel()))
                    if not reads:
                        page[: end.numel()].copy_(end)
                    tickets.append(request(self._direct, page, offset + num_direct))
                transfer = DiskTransfer(tickets, end=(end, page) if reads and page is not None else None)
            self._in_flight.append(transfer)
            return transfer

    def map(self, offset: int, num_bytes: int) -> mmap.mmap:
        """Return a shared mapping of the file from `offset`, rounded down to the allocation granularity."""
        with self._open():
            self._go(is_cached=True)
            # An access beyond the end of the file would raise SIGBUS.
            if os.fstat(self._cached).st_size < offset + num_bytes:
                raise OSError(errno.EIO, "the file is shorter than it should be", os.fspath(self._path))
            start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            memory = mmap.mmap(self._cached, offset + num_bytes - start, mmap.MAP_SHARED, offset=start)
            self._mapped.add(memory)
            return memory

    def close(self) -> None:
        """Close the file. No request may be in flight."""
        with self._lock:
            self._is_closed = True
            self._in_flight.clear()
            os.close(self._direct)
            os.close(self._cached)

    def _open(self) -> threading.Lock:
        """Check the file and return the lock, not acquired: in a forked child another thread may have held it.

        Raises:
            ConfigError: The file is closed or belongs to another process.
        """
        if os.getpid() != self._process:
            raise ConfigError(
                f"{self._path} belongs to process {self._process}, and process {os.getpid()} was forked from it: create"
                " an offload tier in each process"
            )
        if self._is_closed:
            raise ConfigError("the offload tier is closed: create a new one")
        return self._lock

    def _choose_way(self, data: Tensor) -> int:
        """Choose direct or cached I/O for `data`; return the length of its direct prefix in bytes."""
        num_bytes = data.numel()
        num_direct = num_bytes // ALIGNMENT * ALIGNMENT if data.data_ptr() % ALIGNMENT == 0 else 0
        is_bounce_slow = num_bytes - num_direct > _BOUNCE_BUFFER_BYTES
        self._go(is_cached=not self._is_direct or is_bounce_slow or len(self._mapped) > 0)
        return num_direct

    def _go(self, *, is_cached: bool) -> None:
        is_turn = is_cached != self._is_cached_way
        while self._in_flight and (is_turn or self._in_flight[0].is_done()):
            self._in_flight[0].settle()
            self._in_flight.popleft()
        self._is_cached_way = is_cached

    def _grow(self, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        free = shutil.disk_usage(self._path.parent).free
        if free < num_bytes:
            raise ConfigError(self._disk_full_error(num_bytes, free))
        try:
            reserve_space(self._cached, self._end + num_bytes)
        except OSError as error:
            os.ftruncate(self._cached, self._end)  # the reservation may be partial
            if error.errno in _FULL:
                free = shutil.disk_usage(self._path.parent).free
                raise ConfigError(self._disk_full_error(num_bytes, free)) from error
            raise OSError(error.errno, error.strerror, os.fspath(self._path)) from error
        self._end += num_bytes

    def _disk_full_error(self, num_bytes: int, free: int) -> str:
        return (
            f"model data that go to {self._path.parent} need {num_bytes} bytes beside the {self._end} that are there,"
            f" and {free} bytes are free there, of which a limit may deny you some: free some space, or give an"
            " offload_dir on a larger disk"
        )


def whole_pages(num_bytes: int) -> int:
    """Round a number of bytes up to the alignment of direct I/O."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class DiskTier:
    """Tier on a disk, in a file that is removed with the tier or at process exit.

    A tier that is dropped with all its blocks is closed. It can't be used in a forked process, where `close` has no
    effect.

    Args:
        directory: Parent directory of the file, created if missing; optional, defaults to the system's directory for
            temporary files.

    Raises:
        ConfigError: The file can't be created.
    """

    name: Literal["disk"] = "disk"
    has_streams = False

    def __init__(self, directory: str | None) -> None:
        self.bytes_held = 0
        queue = DiskQueue()
        try:
            if directory is not None:
                os.makedirs(directory, exist_ok=True)
            own = ScratchDirectory(directory, contents="model data", setting="offload_dir")
            self._file = BlockFile(own.path / "shards.bin", queue)
        except OSError as error:
            queue.close()
            raise ConfigError(
                f"the file for offloaded shards can't be created: {error}. Give a writable offload_dir"
            ) from error
        self._finalizer = weakref.finalize(self, _close, queue, self._file, own, os.getpid())

    def stream(self, direction: Direction, device: torch.device) -> AbstractContextManager[None]:
        """Return the context of the current stream: the disk reads and writes host memory."""
        return nullcontext()

    def new_block(self, num_bytes: int) -> TierBlock:
        """Return an empty block with reserved disk space.

        Raises:
            ConfigError: The disk is full, or the tier is closed or belongs to another process.
            OSError: The disk failed.
        """
        offset, is_zero = self._file.allocate(whole_pages(num_bytes))
        self.bytes_held += num_bytes
        return _DiskBlock(self, self._file, num_bytes, offset, is_zero)

    def close(self) -> None:
        """Wait for all requests in flight and remove the file. Idempotent."""
        self._finalizer()


def _close(queue: DiskQueue, file: BlockFile, directory: ScratchDirectory, process: int) -> None:
    """Close a tier; a module-level function, so that it can also finalize a dropped tier."""
    if os.getpid() == process:
        queue.close()
        file.close()
        directory.remove()


class _DiskBlock:
    """Block at an offset of the file."""

    def __init__(self, tier: DiskTier, file: BlockFile, num_bytes: int, offset: int, is_zero: bool) -> None:
        self.num_bytes = num_bytes
        self.is_empty = True
        self._tier = tier  # keeps the file open
        self._file = file
        self._offset = offset
        self._is_zero = is_zero  # while the block is empty, whether the file is known to be zero there
        self._is_freed = False
        self._last: DiskTransfer | None = None
        self._last_write: DiskTransfer | None = None
        self._mapped: weakref.ref[mmap.mmap] | None = None

    def read_into(self, tensor: Tensor) -> Transfer:
        data = self._begin(tensor)
        if self.is_empty:
            data.zero_()
            return DiskTransfer([])
        if self._last_write is not None and self._last_write.error is not None:  # the content is undefined
            return DiskTransfer([], error=self._last_write.error)
        self._last = self._file.read(data, self._offset)
        return self._last

    def write_from(self, tensor: Tensor) -> Transfer:
        data = self._begin(tensor)
        self.is_empty = False
        self._last = self._last_write = self._file.write(data, self._offset)
        return self._last

    def as_tensor(self, dtype: torch.dtype, *, waits: bool = True) -> Tensor:
        assert not self._is_freed, "the block was freed"
        self._wait_for_transfers()
        if self._last_write is not None and self._last_write.error is not None:  # the content is undefined
            raise self._last_write.error.with_traceback(None)
        if self.num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        memory = None if self._mapped is None else self._mapped()
        if memory is None:
            memory = self._file.map(self._offset, self.num_bytes)
            self._mapped = weakref.ref(memory)
        start = self._offset % mmap.ALLOCATIONGRANULARITY
        tensor = torch.frombuffer(memory, dtype=dtype, count=self.num_bytes // dtype.itemsize, offset=start)
        if self.is_empty and not self._is_zero:
            tensor.zero_()
        self.is_empty = False  # the caller may write through it
        return tensor

    def free(self) -> None:
        if self._is_freed:
            return
        self._wait_for_transfers()
        self._is_freed = True
        self._tier.bytes_held -= self.num_bytes
        extent = (self._offset, whole_pages(self.num_bytes))
        memory = None if self._mapped is None else self._mapped()
        if memory is None:
            self._file.free(extent)
        else:  # the tensor would show another block allocated there
            weakref.finalize(memory, self._file.free, extent).atexit = False

    def _begin(self, tensor: Tensor) -> Tensor:
        assert not self._is_freed, "the block was freed"
        assert tensor.device.type == "cpu", f"a tensor on {tensor.device} for a block on a disk"
        data = bytes_of(tensor, self.num_bytes)
        self._wait_for_transfers()
        return data

    def _wait_for_transfers(self) -> None:
        if self._last is not None:
            self._last.settle()
