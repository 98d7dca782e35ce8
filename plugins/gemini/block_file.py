"""The file of a disk tier: its room, requests under way, and memory that shows it."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from booster.errors import ConfigError
from booster.kernels.disk_io import ALIGNMENT, DiskQueue, Ticket, aligned_buffer, open_data_file

__all__ = ["BlockFile", "DiskTransfer", "whole_pages"]

# Note [Two ways to the file]
# Requests go past the page cache (the direct way) where the file system can do that, or through it (the cached way).
# The system keeps the two coherent one after another, but not at the same time: pages of the cache come in groups, so
# that a page which is changed through a mapping may be written back together with older neighbours, over what another
# request writes directly. So all requests under way go the same way, and before one goes the other way, those under
# way are waited for. The cached way is for files that know no other, for as long as a tensor over the file lives, and
# for tensors in memory whose address the direct way doesn't take.
#
# The direct way moves whole pages. What is left at the end of a tensor goes through a page of its own, and so do small
# tensors at addresses that are not aligned.
_DETOUR_BYTES = 64 << 10

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


class DiskTransfer:
    """A read or write of a block: its parts, and the page that the end of what is read comes in.

    Attributes:
        error: What failed, once it is settled.
    """

    def __init__(
        self, tickets: Sequence[Ticket], *, end: tuple[Tensor, Tensor] | None = None, error: OSError | None = None
    ) -> None:
        self.error = error
        self._tickets = tickets
        self._end = end

    def is_done(self) -> bool:
        """Returns True if `settle` would return at once."""
        return all(ticket.done() for ticket in self._tickets)

    def settle(self) -> None:
        """Waits until nothing of it is under way, for somebody who only wants to go on."""
        for ticket in self._tickets:
            try:
                ticket.wait()
            except OSError as error:
                self.error = self.error or error  # raised by `wait`, when all parts have ended

    def wait(self) -> None:
        """Waits, fills in the end of what is read, and raises what failed; any number of times.

        Raises:
            OSError: A part failed.
        """
        self.settle()
        end, self._end = self._end, None
        if self.error is not None:
            raise self.error.with_traceback(None)
        if end is not None:
            into, page = end
            into.copy_(page[: into.numel()])


class BlockFile:
    """The file: its room, and the requests under way. See Note [Two ways to the file].

    Args:
        path: Where it is made.
        queue: What does the requests; closed before the file is.
    """

    def __init__(self, path: Path, queue: DiskQueue) -> None:
        self._path = path
        self._queue = queue
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        # One page, on which the direct way is tried.
        self._direct, self._is_direct = open_data_file(path, ALIGNMENT)
        self._cached = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._is_cached_way = not self._is_direct
        self._under_way: deque[DiskTransfer] = deque()
        self._shown: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._end = 0
        self._room = _Room()

    def take(self, num_bytes: int) -> tuple[int, bool]:
        """Returns the offset of whole pages that are reserved, and whether they are known to be zero."""
        with self._open():
            offset = self._room.take(num_bytes)
            if offset is not None:
                return offset, False
            offset = self._end
            self._grow(num_bytes)
            return offset, True

    def give_back(self, extent: tuple[int, int]) -> None:
        """Lets the pages (offset and number of bytes) be taken again; also from inside of a garbage collection."""
        self._room.given_back.append(extent)

    def read(self, data: Tensor, offset: int) -> DiskTransfer:
        """Starts to fill bytes in memory with those at an offset."""
        with self._open():
            num_direct = self._choose_way(data)
            if self._is_cached_way:
                return self._started([self._queue.read(self._cached, data, offset)])
            tickets = [self._queue.read(self._direct, data[:num_direct], offset)] if num_direct else []
            end, page = data[num_direct:], None
            if end.numel():
                page = aligned_buffer(whole_pages(end.numel()))
                tickets.append(self._queue.read(self._direct, page, offset + num_direct))
            return self._started(tickets, None if page is None else (end, page))

    def write(self, data: Tensor, offset: int) -> DiskTransfer:
        """Starts to write bytes from memory to an offset."""
        with self._open():
            num_direct = self._choose_way(data)
            if self._is_cached_way:
                return self._started([self._queue.write(self._cached, data, offset)])
            tickets = [self._queue.write(self._direct, data[:num_direct], offset)] if num_direct else []
            end = data[num_direct:]
            if end.numel():
                page = aligned_buffer(whole_pages(end.numel()))
                page[: end.numel()].copy_(end)
                tickets.append(self._queue.write(self._direct, page, offset + num_direct))
            return self._started(tickets)

    def show(self, offset: int, num_bytes: int) -> mmap.mmap:
        """Returns memory that is the file's from an offset on, rounded down to what the system can map."""
        with self._open():
            self._go(is_cached=True)
            # Touching a page that the file doesn't have would end the process.
            if os.fstat(self._cached).st_size < offset + num_bytes:
                raise OSError(errno.EIO, "the file is shorter than it should be", os.fspath(self._path))
            start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            memory = mmap.mmap(self._cached, offset + num_bytes - start, mmap.MAP_SHARED, offset=start)
            self._shown.add(memory)
            return memory

    def close(self) -> None:
        """Closes the file; nothing may be under way."""
        with self._lock:
            self._is_closed = True
            self._under_way.clear()
            os.close(self._direct)
            os.close(self._cached)

    def _open(self) -> threading.Lock:
        """Returns the lock; before it is taken, as another thread may have held it when the process was forked.

        Raises:
            ConfigError: The file is closed, or another process's.
        """
        if os.getpid() != self._process:
            raise ConfigError(
                f"{self._path} belongs to process {self._process}, and process {os.getpid()} was forked from it: make"
                " an offload tier in each process"
            )
        if self._is_closed:
            raise ConfigError("the offload tier is closed: make another one")
        return self._lock

    def _choose_way(self, data: Tensor) -> int:
        """Chooses the way for bytes in memory, and returns how many of the first go directly, if they do."""
        num_bytes = data.numel()
        num_direct = num_bytes // ALIGNMENT * ALIGNMENT if data.data_ptr() % ALIGNMENT == 0 else 0
        is_detour_long = num_bytes - num_direct > _DETOUR_BYTES
        self._go(is_cached=not self._is_direct or is_detour_long or len(self._shown) > 0)
        return num_direct

    def _go(self, *, is_cached: bool) -> None:
        is_turn = is_cached != self._is_cached_way
        while self._under_way and (is_turn or self._under_way[0].is_done()):
            self._under_way[0].settle()
            self._under_way.popleft()
        self._is_cached_way = is_cached

    def _started(self, tickets: Sequence[Ticket], end: tuple[Tensor, Tensor] | None = None) -> DiskTransfer:
        transfer = DiskTransfer(tickets, end=end)
        self._under_way.append(transfer)
        return transfer

    def _grow(self, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        free = shutil.disk_usage(self._path.parent).free
        if free < num_bytes:
            raise ConfigError(self._no_room(num_bytes, free))
        try:
            _reserve(self._cached, self._end, num_bytes)
        except OSError as error:
            os.ftruncate(self._cached, self._end)  # a part may have been reserved
            if error.errno in _FULL:
                free = shutil.disk_usage(self._path.parent).free
                raise ConfigError(self._no_room(num_bytes, free)) from error
            raise OSError(error.errno, error.strerror, os.fspath(self._path)) from error
        self._end += num_bytes

    def _no_room(self, num_bytes: int, free: int) -> str:
        return (
            f"model data that go to {self._path.parent} need {num_bytes} bytes beside the {self._end} that are there,"
            f" and {free} bytes are free there, of which a limit may deny you some: free some space, or give an"
            " offload_dir on a larger disk"
        )


class _Room:
    """Pages that were given back, as stretches of whole pages.

    Attributes:
        given_back: Offsets and numbers of bytes that are not sorted in yet. Appending to it needs no lock, which the
            thread that collects garbage may hold already.
    """

    def __init__(self) -> None:
        self.given_back: deque[tuple[int, int]] = deque()
        self._stretches: list[tuple[int, int]] = []  # by offset; no two touch

    def take(self, num_bytes: int) -> int | None:
        """Returns the offset of pages of the first stretch that has enough of them; None: there is none."""
        self._sort_in()
        for index, (offset, length) in enumerate(self._stretches):
            if length >= num_bytes > 0:
                rest = [(offset + num_bytes, length - num_bytes)] if length > num_bytes else []
                self._stretches[index : index + 1] = rest
                return offset
        return None

    def _sort_in(self) -> None:
        if not self.given_back:
            return
        added = [self.given_back.popleft() for _ in range(len(self.given_back))]
        joined: list[tuple[int, int]] = []
        for offset, length in sorted(one for one in self._stretches + added if one[1] > 0):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        self._stretches = joined


def whole_pages(num_bytes: int) -> int:
    """Returns a number of bytes rounded up to what the direct way moves."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _reserve(descriptor: int, offset: int, num_bytes: int) -> None:
    """Makes the file longer, with its space reserved where the system can do that."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, offset, num_bytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    os.ftruncate(descriptor, offset + num_bytes)
