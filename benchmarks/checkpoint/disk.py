"""The disk below a checkpoint: which file system it is, what it can do at most, and whether a file is in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from booster.kernels.disk_io import aligned_buffer

__all__ = [
    "COLD_SHARE",
    "cached_share",
    "drop_cached",
    "file_system",
    "read_cached",
    "read_raw",
    "sync_files",
    "write_raw",
]

_BLOCK_BYTES = 16 << 20
_DIRECT_ALIGNMENT = 4096
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_MOUNTS = Path("/proc/self/mountinfo")
COLD_SHARE = 0.01  # a directory's or a header's pages come back at once
_PROT_READ, _MAP_SHARED = 1, 1


def file_system(path: Path) -> str:
    """Returns the type of the file system that a path lies on, such as "ext4"; "unknown" outside of Linux."""
    if not _MOUNTS.is_file():
        return "unknown"
    resolved, best = path.resolve(), (Path("/"), "unknown")
    for line in _MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        if resolved.is_relative_to(point) and len(point.parts) >= len(best[0].parts):
            best = point, after.split()[0]
    return best[1]


def write_raw(path: Path, num_bytes: int, *, is_direct: bool) -> None:
    """Writes that many bytes in blocks of 16 MiB and fsyncs them: what a checkpoint of this size costs at least."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if is_direct else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        _each_block("write", num_bytes, lambda block, offset: os.pwrite(descriptor, block, offset))
        os.ftruncate(descriptor, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_raw(path: Path) -> None:
    """Reads a file in blocks of 16 MiB, past the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _each_block("read", os.fstat(descriptor).st_size, lambda block, offset: os.preadv(descriptor, [block], offset))
    finally:
        os.close(descriptor)


@cache
def _block(purpose: str) -> memoryview:
    """One block for all writes and one for all reads: a first touch of memory costs more than a write.

    In huge pages: reads into scattered ones of 4 KiB take up to twice as long, depending on what ran before.
    """
    block, step = memoryview(aligned_buffer(_BLOCK_BYTES).numpy()), 1 << 20
    for offset in range(0, _BLOCK_BYTES, step):
        block[offset : offset + step] = os.urandom(step)
    return block


def _each_block(purpose: str, num_bytes: int, transfer: Callable[[memoryview, int], int]) -> None:
    offset, view = 0, _block(purpose)
    while offset < num_bytes:
        length = min(_BLOCK_BYTES, num_bytes - offset)
        aligned = -(-length // _DIRECT_ALIGNMENT) * _DIRECT_ALIGNMENT
        done = transfer(view[:aligned], offset)
        if done <= 0:
            raise OSError(f"a block at {offset} of {num_bytes} bytes was not transferred")
        offset += done


def sync_files(directory: Path) -> None:
    """Makes every file below a directory durable, and the directories."""
    for path in [*_files(directory), *(Path(root) for root, _, _ in os.walk(directory))]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_cached(directory: Path) -> float:
    """Has the kernel forget what it holds of the files below a directory; returns the share that it holds still.

    The files must be durable: what is still to be written can't be forgotten. Asks for the files alone, and only where
    that does not help, and is allowed, for everything on this machine.
    """
    for path in _files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    share = cached_share(directory)
    if share > COLD_SHARE and os.access(_DROP_CACHES, os.W_OK):
        os.sync()
        _DROP_CACHES.write_text("1")
        share = cached_share(directory)
    return share


def read_cached(directory: Path) -> None:
    """Reads every file below a directory through the page cache, which then holds them."""
    for path in _files(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(_block("read")):
                pass


def cached_share(directory: Path) -> float:
    """Returns which share of the files below a directory lies in the page cache, from 0 to 1."""
    counts = [_resident_pages(path) for path in _files(directory) if path.stat().st_size]
    num_pages = sum(total for _, total in counts)
    return sum(resident for resident, _ in counts) / num_pages if num_pages else 0.0


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink())


def _resident_pages(path: Path) -> tuple[int, int]:
    """Returns how many of a file's pages are in the page cache, and how many it has; looking reads none of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        num_bytes = os.fstat(descriptor).st_size
        num_pages = -(-num_bytes // mmap.PAGESIZE)
        address = libc.mmap(None, num_bytes, _PROT_READ, _MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"mmap of {path} failed")
        states = ctypes.create_string_buffer(num_pages)
        failed = libc.mincore(address, num_bytes, states)
        libc.munmap(address, num_bytes)
    finally:
        os.close(descriptor)
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
    # The other bits of a page's state are reserved.
    return sum(byte & 1 for byte in states.raw[:num_pages]), num_pages
