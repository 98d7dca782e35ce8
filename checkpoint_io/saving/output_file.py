"""A file that several threads of a rank, and several ranks, write into: past the page cache where that is possible."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from booster.checkpoint_io.files.tensor_bytes import bytes_of
from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.storage import OpenFile, Storage

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["OutputFile", "Window"]

# Note [Direct writing]
# Data that goes through the page cache is copied once more, and the disk waits until fsync for it: past the cache
# (O_DIRECT) it arrives at the disk's own speed. That takes whole pages. So a file is open twice: whole pages go one
# way, what is left at the edges goes the other. No page is written both ways: one goes past the cache only if all of it
# is one thread's, and where the parts of two threads or ranks meet inside of a page, both go through the cache. One
# fsync covers both ways. A file system that cannot do it says EINVAL, when opening or when writing: then all goes
# through the cache.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


class OutputFile:
    """A file that is there already in its full size.

    Args:
        storage: Where it is.
        path: The file.
        num_jobs: How many jobs will be reported done; with the last one the file is synced and closed.
        is_direct: Whether to try to go past the page cache.
    """

    def __init__(self, storage: Storage, path: Path, *, num_jobs: int, is_direct: bool) -> None:
        self._storage = storage
        self._path = path
        self._num_jobs = num_jobs
        self._is_direct = is_direct
        self._lock = threading.Lock()
        self._cached: OpenFile | None = None
        self._direct: OpenFile | None = None

    def open(self) -> None:
        """Opens the file if it isn't open yet."""
        with self._lock:
            if self._cached is not None:
                return
            self._cached = self._storage.open_for_writing(self._path)
            if self._is_direct:
                try:
                    self._direct = self._storage.open_for_writing(self._path, direct=True)
                except OSError as error:
                    self._check_unsupported(error)

    def write(self, data: Buffer, offset: int) -> None:
        """Writes any bytes anywhere."""
        assert self._cached is not None, f"{self._path} is not open"
        self._storage.write_at(self._cached, data, offset)

    def write_pages(self, data: Buffer, offset: int) -> None:
        """Writes whole pages from memory that starts at a page."""
        if self._is_direct and self._direct is not None:
            try:
                self._storage.write_at(self._direct, data, offset)
                return
            except OSError as error:
                self._check_unsupported(error)
        self.write(data, offset)

    def job_done(self) -> None:
        """Counts a job; after the last one, what this rank wrote is on the disk."""
        with self._lock:
            self._num_jobs -= 1
            if self._num_jobs > 0 or self._cached is None:
                return
        self._storage.sync(self._cached)
        self.close()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        with self._lock:
            opened = [file for file in (self._cached, self._direct) if file is not None]
            self._cached = self._direct = None
        for file in opened:
            self._storage.close(file)

    def _check_unsupported(self, error: OSError) -> None:
        if error.errno not in _UNSUPPORTED:
            raise error
        self._is_direct = False


class Window:
    """A staging buffer over a file: takes bytes in the order of the file, and writes them when it is full.

    Args:
        file: Where the bytes go.
        buffer: The staging buffer; it holds bytes of the file from a page on.
    """

    def __init__(self, file: OutputFile, buffer: torch.Tensor) -> None:
        self._file = file
        self._buffer = buffer
        self._bytes = bytes_of(buffer)
        self._start = self._stop = 0  # what is waiting, as offsets in the file

    def reserve(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Returns where to put bytes that go to `offset` of the file; the caller fills all of it before the next call.

        There may be room for fewer than asked for.
        """
        base = self._base
        if offset != self._stop or offset - base == len(self._bytes):
            self.flush()
            self._start = self._stop = offset
            base = self._base
        room = self._buffer[offset - base : offset - base + num_bytes]
        self._stop += room.numel()
        return room

    def scratch(self) -> torch.Tensor:
        """Returns the whole buffer, for another use until the next call."""
        self.flush()
        return self._buffer

    def flush(self) -> None:
        """Writes what is waiting: whole pages at once, and the edges."""
        start, stop, base = self._start, self._stop, self._base
        self._start = self._stop = 0
        first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        if first >= last:
            first = last = stop
        if start < first:
            self._file.write(self._bytes[start - base : first - base], start)
        if first < last:
            self._file.write_pages(self._bytes[first - base : last - base], first)
        if last < stop:
            self._file.write(self._bytes[last - base : stop - base], last)

    @property
    def _base(self) -> int:
        return self._start // PAGE_BYTES * PAGE_BYTES
