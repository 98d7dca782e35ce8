"""Asynchronous reads and writes of tensors at file offsets, with direct I/O where the file system supports it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import stat
import sys
import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch

from booster.errors import ConfigError

ALIGNMENT = 4096  # alignment that O_DIRECT requires of addresses, offsets and lengths on any common disk

_MAX_CALL_BYTES = 1 << 30  # the system's limit per call is 2 GiB less a page
_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_WIPEONFORK: int | None = 18 if sys.platform == "linux" else None  # missing in Python's mmap module

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_WAIT_SECONDS = 0.2  # Ctrl-C is handled at least at this interval


class IOTicket:
    """Handle of one request of a `DiskQueue`; keeps its tensor alive until the request is done."""

    def __init__(self, is_write: bool, descriptor: int, tensor: torch.Tensor, offset: int) -> None:
        self._is_write = is_write
        self._descriptor, self._name = descriptor, _name_of(descriptor)
        self._tensor: torch.Tensor | None = tensor
        self._address, self._num_bytes = tensor.data_ptr(), tensor.nbytes
        self._offset = offset
        self._num_done = 0
        self._process = os.getpid()
        self._finished = threading.Event()
        self._error: OSError | None = None

    def wait(self) -> None:
        """Wait until the request is done. May be called repeatedly, and in any order of tickets.

        Raises:
            OSError: The request failed, with the errno of the system call, or `EIO` for a read past the end of file.
            ConfigError: This is a forked process, which has none of the queue's threads.
        """
        _check_process(self._process)
        while not self._finished.wait(_WAIT_SECONDS):
            pass
        if self._error is not None:  # anew, as a traceback keeps the caller's frames alive
            raise OSError(self._error.errno, self._error.strerror, self._error.filename)

    def done(self) -> bool:
        """Return whether the request is done, so that `wait` would not block."""
        _check_process(self._process)
        return self._finished.is_set()

    def run(self) -> None:
        """Run the request, in a thread of the queue; an error is kept for `wait`."""
        try:
            descriptor = os.dup(self._descriptor)  # the garbage collector may close the file in this thread
            try:
                while self._num_done < self._num_bytes:
                    self._transfer_next(descriptor)
            finally:
                os.close(descriptor)
        except Exception as error:
            code, text = (error.errno, error.strerror) if isinstance(error, OSError) else (None, str(error))
            done = f"{self._num_done} of {self._num_bytes} bytes at offset {self._offset}"
            text = f"{text} ({done} {'written' if self._is_write else 'read'})"
            self._error = OSError(code or errno.EIO, text, self._name)
        finally:
            self._tensor = None
            self._finished.set()

    def _transfer_next(self, descriptor: int) -> None:
        length = min(self._num_bytes - self._num_done, _MAX_CALL_BYTES)
        memory = (ctypes.c_char * length).from_address(self._address + self._num_done)
        offset = self._offset + self._num_done
        if self._is_write:
            count = os.pwrite(descriptor, memory, offset)
            if count == 0:  # the file system wrote nothing without an error
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._num_done += count
            return
        count = os.preadv(descriptor, [memory], offset)
        self._num_done += count
        if count < length:
            # The size is checked because continuing a direct read within a block would be an error.
            status = os.fstat(descriptor)
            if count == 0 or (stat.S_ISREG(status.st_mode) and offset + count >= status.st_size):
                raise OSError(errno.EIO, "the file is shorter than it should be")


class DiskQueue:
    """Queue of asynchronous reads and writes, for any number of files.

    Requests may run concurrently and in any order: wait for one before submitting another that depends on it. A queue
    that is garbage-collected completes its requests first. Errors of requests that are never waited for are not
    reported.

    Args:
        num_threads: Number of concurrent requests.

    Raises:
        ConfigError: `num_threads` is less than 1.
    """

    def __init__(self, num_threads: int = 4) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads={num_threads} leaves no thread to read and write: give 1 or more")
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._requests: SimpleQueue[IOTicket | None] = SimpleQueue()
        threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _finish, self._requests, threads, self._process)
        for index in range(num_threads):
            # A daemon, as Python joins other threads at exit before finalizers run.
            thread = threading.Thread(target=_run_requests, args=(self._requests,), name=f"disk-{index}", daemon=True)
            thread.start()
            threads.append(thread)

    def read(self, descriptor: int, tensor: torch.Tensor, offset: int) -> IOTicket:
        """Start reading the file's bytes from `offset` into a contiguous CPU tensor.

        The tensor's content is undefined until the ticket is waited for, and after an error.

        Raises:
            ConfigError: The queue is closed, or was opened in a parent process.
        """
        return self._submit(False, descriptor, tensor, offset)

    def write(self, descriptor: int, tensor: torch.Tensor, offset: int) -> IOTicket:
        """Start writing a contiguous CPU tensor to the file at `offset`; the tensor must not change until it is done.

        Raises:
            ConfigError: The queue is closed, or was opened in a parent process.
        """
        return self._submit(True, descriptor, tensor, offset)

    def close(self) -> None:
        """Wait for all requests in flight and stop the threads. Idempotent."""
        with self._lock:
            self._finalizer()

    def __enter__(self) -> DiskQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, is_write: bool, descriptor: int, tensor: torch.Tensor, offset: int) -> IOTicket:
        _check_process(self._process)
        address, num_bytes = tensor.data_ptr(), tensor.nbytes
        assert tensor.device.type == "cpu", f"a tensor on {tensor.device}"
        assert tensor.is_contiguous(), f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
        assert (address | num_bytes | offset) % ALIGNMENT == 0 or not _is_direct(descriptor), (
            f"{num_bytes} bytes of memory at {address:#x}: their number, address and offset in the file must be"
            f" multiples of {ALIGNMENT}, as descriptor {descriptor} is open with O_DIRECT"
        )
        assert offset >= 0, f"offset {offset}"
        ticket = IOTicket(is_write, descriptor, tensor, offset)
        with self._lock:
            if not self._finalizer.alive:
                raise ConfigError("the disk queue is closed: open another one")
            self._requests.put(ticket)
        return ticket


def _run_requests(requests: SimpleQueue[IOTicket | None]) -> None:
    # A signal that is delivered to this thread would not interrupt a wait of the main thread. Crashes stay its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _CRASHES)
    while (request := requests.get()) is not None:
        request.run()
        del request  # an idle thread keeps none alive


def _finish(requests: SimpleQueue[IOTicket | None], threads: list[threading.Thread], process: int) -> None:
    """Complete the requests and end the threads; a module-level function, as a finalizer must not hold the queue."""
    if os.getpid() != process:  # a forked process has none of the threads
        return
    for _ in threads:
        requests.put(None)
    interrupt = None
    while threads:
        try:
            if threads[-1] is not threading.current_thread():  # it is if the garbage collector closes the queue in it
                threads[-1].join()
            threads.pop()
        except KeyboardInterrupt as error:  # keep waiting, as the caller may free the requests' memory next
            interrupt = error
    if interrupt is not None:
        raise interrupt


def open_data_file(path: str | os.PathLike[str], num_bytes: int) -> tuple[int, bool]:
    """Create a file with mode 0600 and preallocated space, so that a full disk is detected here.

    The size is `num_bytes` rounded up to a multiple of `ALIGNMENT`.

    Returns:
        Descriptor, open for reading and writing, and whether it uses O_DIRECT.

    Raises:
        OSError: The file exists or can't be created, or the disk is full; no new file is left behind.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        reserve_space(descriptor, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        return descriptor, _make_direct(descriptor)
    except OSError as error:
        os.close(descriptor)
        os.unlink(path)
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def aligned_buffer(num_bytes: int) -> torch.Tensor:
    """Return a uint8 tensor for O_DIRECT, filled with zeros and aligned to at least `ALIGNMENT`.

    Forked processes see zeros in it.
    """
    # A disk request has a limited number of memory segments, often 128 or 254. With scattered 4 KiB pages a request of
    # 8 MiB is split into ten or more; huge pages gave 4.8 GB/s instead of 1.6 to 1.9 on a virtual disk. And if a
    # process forks while a disk writes into its memory, older kernels may put the bytes into the child's copy-on-write
    # page; with MADV_WIPEONFORK the child gets separate pages.
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping = torch.frombuffer(memory, dtype=torch.uint8)
    start = -mapping.data_ptr() % _HUGE_PAGE_BYTES
    _advise(memory, _MADV_WIPEONFORK, 0, len(memory))
    _advise(memory, _MADV_HUGEPAGE, start, num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    return mapping[start : start + num_bytes]


def _advise(memory: mmap.mmap, advice: int | None, start: int, num_bytes: int) -> None:
    if advice is None or num_bytes == 0:
        return
    with suppress(OSError):  # unsupported by this kernel: slower, or with the risk described in `aligned_buffer`
        memory.madvise(advice, start, num_bytes)


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise ConfigError(
            f"this disk queue belongs to process {process}, and process {os.getpid()} was forked from it without"
            " its threads: open a queue in each process"
        )


def _is_direct(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _O_DIRECT)
    except OSError:  # closed: the request itself will fail
        return False


def _name_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed, or a system without /proc
        return f"descriptor {descriptor}"


# Not `os.posix_fallocate`: on file systems without fallocate, the C library emulates it by writing to every block.
_fallocate: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    _fallocate.restype = ctypes.c_int


def reserve_space(descriptor: int, num_bytes: int) -> None:
    """Set the size of a file and, where the file system can, allocate its space, so that a full disk is found here.

    Raises:
        OSError: The disk is full, or broken; without the file's name.
    """
    while num_bytes > 0 and _fallocate is not None and _fallocate(descriptor, 0, 0, num_bytes) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, num_bytes)


def _make_direct(descriptor: int) -> bool:
    """Enable O_DIRECT if the file system supports it; return whether it does."""
    if _O_DIRECT == 0:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        # Some file systems accept the flag, but then reject reads, or require larger blocks.
        os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT)], 0)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True
