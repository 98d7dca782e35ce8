"""Output file shared by threads and ranks, written with O_DIRECT where possible."""

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

__all__ = ["BufferedFileWriter", "OutputFile"]

# O_DIRECT avoids a copy into the page cache and the flush at fsync, but requires full pages. So a file is open twice:
# full pages are written with O_DIRECT, the unaligned edges through the page cache. No page is written both ways: a page
# is written with O_DIRECT only if all of it belongs to one thread; a page shared by two threads or ranks goes through
# the cache in both. One fsync covers both. A file system without O_DIRECT returns EINVAL on open or on write; then all
# data goes through the cache.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


class OutputFile:
    """File that already exists in full size.

    Args:
        storage: Storage of the file.
        path: Path.
        num_jobs: Number of expected `job_done` calls; the last one syncs and closes the file.
        is_direct: Whether to try O_DIRECT.
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
        """Open the file unless it is open."""
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
                self._check_unsupported(error)
        self.write(data, offset)

    def job_done(self) -> None:
        """Count a finished job; after the last one, sync and close the file."""
        with self._lock:
            self._num_jobs -= 1
            if self._num_jobs > 0 or self._cached is None:
                return
        self._storage.sync(self._cached)
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            opened = [file for file in (self._cached, self._direct) if file is not None]
            self._cached = self._direct = None
        for file in opened:
            self._storage.close(file)

    def _check_unsupported(self, error: OSError) -> None:
        if error.errno not in _UNSUPPORTED:
            raise error
        self._is_direct = False


class BufferedFileWriter:
    """Staging buffer over a file: collects bytes in file order and writes them when it is full.

    Args:
        file: Output file.
        buffer: Staging buffer; its first byte maps to a page boundary of the file.
    """

    def __init__(self, file: OutputFile, buffer: torch.Tensor) -> None:
        self._file = file
        self._buffer = buffer
        self._bytes = bytes_of(buffer)
        self._start = self._stop = 0  # buffered range, as file offsets

    def reserve(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return buffer memory for the bytes at file offset `offset`; the caller fills it before the next call.

        The result may be smaller than requested.
        """
        base = self._base
        if offset != self._stop or offset - base == len(self._bytes):
            self.flush()
            self._start = self._stop = offset
            base = self._base
        target = self._buffer[offset - base : offset - base + num_bytes]
        self._stop += target.numel()
        return target

    def scratch(self) -> torch.Tensor:
        """Return the full buffer for other use until the next call."""
        self.flush()
        return self._buffer

    def flush(self) -> None:
        """Write the buffered bytes: full pages in one call, then the edges."""

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
