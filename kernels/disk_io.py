"""Asynchronous reads and writes of tensors at offsets of files, past the page cache where the file system allows it.

`DiskQueue` takes requests and gives tickets; a few threads or the system's io_uring do the work while Python continues.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from booster.errors import ConfigError

from .build import load_kernel
from .disk_io_reference import END_OF_FILE, ThreadedQueue

ALIGNMENT = 4096  # what O_DIRECT asks of addresses, offsets and lengths on any common disk

# Note [Buffers]
# A disk takes a limited number of stretches of memory at once, often 128 or 254. The pages of a buffer lie anywhere, so
# that a request for 8 MiB is cut into ten or more, unless they are huge ones: on a virtual disk that made 4.8 GB/s out
# of 1.6 to 1.9. And where a process is forked while the disk writes into its memory, as by a data loader, older kernels
# may put the bytes into the child's copy of a page; so a child gets pages of its own instead of copies.
_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_WIPEONFORK: int | None = 18 if sys.platform == "linux" else None  # Python has no name for it

_BACKENDS = ("io_uring", "threads", "python")
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
# A wait inside of a backend does not see Ctrl-C, so it comes back to Python now and then.
_WAIT_SECONDS = 0.2


class _Request(Protocol):
    """What a backend returns for a request."""

    def wait(self, seconds: float) -> bool:
        """Return True once the request is done, False after the time."""

    def done(self) -> bool:
        """Return True if it is done."""

    def result(self) -> tuple[int, int]:
        """Return, once done: 0, an errno or END_OF_FILE; and how many bytes were moved."""


class _Backend(Protocol):
    """What moves the bytes. The memory must stay where it is until the request is done."""

    def submit(self, is_write: bool, descriptor: int, address: int, num_bytes: int, offset: int) -> _Request:
        """Take a request and return at once."""

    def close(self) -> None:
        """Wait for all requests and end the threads; a second call does nothing."""


class Ticket:
    """One request of a `DiskQueue`; keeps its tensor alive until the request is done."""

    def __init__(self, request: _Request, tensor: torch.Tensor, describe: Callable[[int, int], OSError]) -> None:
        self._request = request
        self._tensor: torch.Tensor | None = tensor
        self._describe = describe
        self._process = os.getpid()

    def wait(self) -> None:
        """Return once the request is done; any number of times, in any order.

        Raises:
            OSError: It failed: with the errno of the system's call, or `EIO` for a read past the end of the file.
            ConfigError: In a forked process, which has none of the queue's threads.
        """
        _check_process(self._process)
        while not self._request.wait(_WAIT_SECONDS):
            pass
        self._tensor = None
        code, num_bytes = self._request.result()
        if code != 0:
            raise self._describe(code, num_bytes)

    def done(self) -> bool:
        """Return True if `wait` would return or raise at once."""
        _check_process(self._process)
        return self._request.done()


class DiskQueue:
    """Reads and write in flight, of any number of files.

    Requests may run in any order and at the same time: wait for one before another that depends on it. A queue that is
    dropped finishes its requests first. The error of a request that is not waited for is not reported.

    Args:
        num_threads: How many requests run at once with the backends `threads` and `python`.
        backend: `io_uring`, `threads` (a pool in C++) or `python` (a pool in Python, for machines without a compiler);
            None: the first of them that works here.

    Attributes:
        backend: Which of them it is.

    Raises:
        ConfigError: The backend is unknown or doesn't work here, or there are no threads.
    """

    backend: str

    def __init__(self, num_threads: int = 2, *, backend: str | None = None) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads={num_threads} leaves no thread to read and write: give 1 or more")
        self.backend, self._backend = _open_backend(backend, num_threads)
        self._process = os.getpid()
        self._lock = threading.Lock()
        # Oldest first. Without it a tensor would be freed while the system writes to it, if its ticket is dropped.
        self._under_way: deque[Ticket] = deque()
        self._finalizer = weakref.finalize(self, _finish, self._backend, self._under_way, self._process)

    def read(self, descriptor: int, tensor: torch.Tensor, offset: int) -> Ticket:
        """Start to fill a contiguous CPU tensor with the file's bytes from `offset` on.

        The tensor's content is undefined until the ticket is waited for, and after an error.

        Raises:
            ConfigError: The queue is closed, or belongs to a process that this one was forked from.
        """
        return self._submit(False, descriptor, tensor, offset)

    def write(self, descriptor: int, tensor: torch.Tensor, offset: int) -> Ticket:
        """Start to write a contiguous CPU tensor's bytes to the file at `offset`; don't change it until that is done.

        Raises:
            ConfigError: The queue is closed, or belongs to a process that this one was forked from.
        """
        return self._submit(True, descriptor, tensor, offset)

    def close(self) -> None:
        """Wait for everything in flight and end the threads; a second call does nothing."""
        with self._lock:
            self._finalizer()

    def __enter__(self) -> DiskQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, is_write: bool, descriptor: int, tensor: torch.Tensor, offset: int) -> Ticket:
        _check_process(self._process)
        address, num_bytes = tensor.data_ptr(), tensor.nbytes
        _check_memory(tensor, descriptor, address | num_bytes | offset)
        assert offset >= 0, f"offset {offset}"
        describe = _describer(is_write, descriptor, num_bytes, offset)
        with self._lock:
            if not self._finalizer.alive:
                raise ConfigError("the disk queue is closed: open another one")
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
            request = self._backend.submit(is_write, descriptor, address, num_bytes, offset)
            ticket = Ticket(request, tensor, describe)
            self._under_way.append(ticket)
        return ticket


def open_data_file(path: str | os.PathLike[str], num_bytes: int) -> tuple[int, bool]:
    """Create a file that only its owner may read, with its space reserved, so that a full disk is noticed here.

    The file has at least `num_bytes`, rounded up to a multiple of `ALIGNMENT`.

    Returns:
        The descriptor, open for reading and writing, and whether it goes past the page cache (O_DIRECT).

    Raises:
        OSError: It is there already, or can't be created, or the disk is full; then no file is left.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        _reserve(descriptor, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        return descriptor, _make_direct(descriptor)
    except OSError as error:
        os.close(descriptor)
        os.unlink(path)
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def aligned_buffer(num_bytes: int) -> torch.Tensor:
    """Return a uint8 tensor for O_DIRECT, aligned to `ALIGNMENT` at least, and filled with zeros.

    See Note [Buffers]. A process that is forked sees zeros in it.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    _advise(memory, _MADV_WIPEONFORK, 0, len(memory))
    _advise(memory, _MADV_HUGEPAGE, start, num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    return whole[start : start + num_bytes]


def _advise(memory: mmap.mmap, advice: int | None, start: int, num_bytes: int) -> None:
    if advice is None or num_bytes == 0:
        return
    with suppress(OSError):  # a kernel that doesn't know the advice works as well, slower or with the risk of the note
        memory.madvise(advice, start, num_bytes)


def _open_backend(wanted: str | None, num_threads: int) -> tuple[str, _Backend]:
    if wanted not in (None, *_BACKENDS):
        raise ConfigError(f"backend={wanted!r} is not a backend: choose {', '.join(_BACKENDS)}, or None")
    native = None if wanted == "python" else load_kernel("disk_io")
    if native is None:
        if wanted in ("io_uring", "threads"):
            raise ConfigError(
                f"backend={wanted!r} needs the compiled kernel, which can't be had: take 'python' or None"
            )
        return "python", ThreadedQueue(num_threads)
    if wanted != "threads":
        try:
            return "io_uring", native.RingQueue()
        except OSError as error:  # old kernels have none, containers often forbid it
            if wanted == "io_uring":
                raise ConfigError(f"backend='io_uring' doesn't work here: {error}. Take 'threads' or None") from error
    return "threads", native.ThreadedQueue(num_threads)


def _finish(backend: _Backend, under_way: deque[Ticket], process: int) -> None:
    """Close a queue's backend; a function of its own, so that it also runs when the queue is dropped."""
    if os.getpid() == process:  # a forked process has none of the threads to wait for
        backend.close()
        under_way.clear()


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise ConfigError(
            f"this disk queue belongs to process {process}, and process {os.getpid()} was forked from it and has none"
            " of its threads: open a queue in each process"
        )


def _check_memory(tensor: torch.Tensor, descriptor: int, bits: int) -> None:
    assert tensor.device.type == "cpu", f"a tensor on {tensor.device}"
    assert tensor.is_contiguous(), f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
    assert bits % ALIGNMENT == 0 or not _is_direct(descriptor), (
        f"{tensor.nbytes} bytes of memory at {tensor.data_ptr():#x}: their number, address and offset in the file must"
        f" be multiples of {ALIGNMENT}, as descriptor {descriptor} is open with O_DIRECT"
    )


def _is_direct(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _O_DIRECT)
    except OSError:  # closed: the request itself will say so
        return False


def _describer(is_write: bool, descriptor: int, num_bytes: int, offset: int) -> Callable[[int, int], OSError]:
    """Return what makes a request's error; it asks for the file's name now, while the descriptor is open."""
    try:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed already, or a system without /proc
        name = f"descriptor {descriptor}"

    def describe(code: int, num_done: int) -> OSError:
        done = f"{num_done} of {num_bytes} bytes at offset {offset} {'written' if is_write else 'read'}"
        if code == END_OF_FILE:
            return OSError(errno.EIO, f"the file is shorter than it should be ({done})", name)
        return OSError(code, f"{os.strerror(code)} ({done})", name)

    return describe


# Not `os.posix_fallocate`: where the file system can't reserve, the C library writes into every block instead.
def _find_fallocate() -> Callable[..., int] | None:
    library: Any = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "fallocate64", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        function.restype = ctypes.c_int
    return function


_fallocate = _find_fallocate()


def _reserve(descriptor: int, num_bytes: int) -> None:
    while num_bytes > 0 and _fallocate is not None and _fallocate(descriptor, 0, 0, num_bytes) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, num_bytes)


def _make_direct(descriptor: int) -> bool:
    """Let the descriptor go past the page cache if its file system can; returns whether it does."""
    if _O_DIRECT == 0:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        # Some file systems take the flag and then refuse to read, or ask for larger blocks.
        os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT)], 0)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True
