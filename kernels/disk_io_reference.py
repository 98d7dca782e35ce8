"""Pure-Python backend of `disk_io`: a thread pool that calls `os.preadv` and `os.pwrite`."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable
from queue import SimpleQueue

END_OF_FILE = -1  # in place of an errno

_MAX_CALL_BYTES = 1 << 30  # the system's limit per call is 2 GiB less a page


class _Request:
    """One read or write and its result."""

    def __init__(self, is_write: bool, descriptor: int, address: int, num_bytes: int, offset: int) -> None:
        self._is_write = is_write
        self._descriptor = descriptor
        self._address = address
        self._num_bytes = num_bytes
        self._offset = offset
        self._num_done = 0
        self._code = 0
        self._finished = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Wait; return False if the request is not done after this time."""
        return self._finished.wait(seconds)

    def done(self) -> bool:
        """Return whether the request is done."""
        return self._finished.is_set()

    def result(self) -> tuple[int, int]:
        """Return the status of a done request (0, an errno or END_OF_FILE) and the number of bytes transferred."""
        return self._code, self._num_done

    def run(self) -> None:
        """Run the request; an `OSError` is stored for `result` instead of raised."""
        code = errno.EIO
        try:
            code = self._transfer_all()
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            self._code = code
            self._finished.set()

    def _transfer_all(self) -> int:
        code = 0
        while self._num_done < self._num_bytes and code == 0:
            code = self._transfer_next()
        return code

    def _transfer_next(self) -> int:
        length = min(self._num_bytes - self._num_done, _MAX_CALL_BYTES)
        memory = (ctypes.c_char * length).from_address(self._address + self._num_done)
        offset = self._offset + self._num_done
        move: Callable[[], int] = (
            (lambda: os.pwrite(self._descriptor, memory, offset))
            if self._is_write
            else (lambda: os.preadv(self._descriptor, [memory], offset))
        )
        count = move()
        self._num_done += count
        if count == length:
            return 0
        if self._is_write:
            return 0 if count > 0 else errno.EIO  # the file system wrote nothing without an error
        return END_OF_FILE if count == 0 or self._is_at_end() else 0

    def _is_at_end(self) -> bool:
        # The size is checked because continuing a direct read within a block would be an error.
        status = os.fstat(self._descriptor)
        return stat.S_ISREG(status.st_mode) and self._offset + self._num_done >= status.st_size


class ThreadedQueue:
    """Thread pool; each thread runs one request at a time."""

    def __init__(self, num_threads: int) -> None:
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        # Daemons, as Python joins other threads at exit before finalizers run.
        self._threads = [
            threading.Thread(target=_run_requests, args=(self._requests,), name=f"disk-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, is_write: bool, descriptor: int, address: int, num_bytes: int, offset: int) -> _Request:
        """Submit a request without blocking. The memory must stay valid until the request is done."""
        request = _Request(is_write, descriptor, address, num_bytes, offset)
        self._requests.put(request)
        return request

    def close(self) -> None:
        """Wait for all requests and stop the threads. Idempotent."""
        for _ in self._threads:
            self._requests.put(None)
        interrupt = None
        while self._threads:
            try:
                _join(self._threads[-1])
                self._threads.pop()
            except KeyboardInterrupt as error:  # keep waiting, as the caller may free the requests' memory next
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():  # true if the garbage collector closes the queue in this thread
        thread.join()


def _run_requests(requests: SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        request.run()
