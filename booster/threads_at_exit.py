"""Threads that have to end before the interpreter does."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

__all__ = ["join_at_exit"]

# Note [Threads at exit]
# A daemon thread that wants the interpreter's lock while the interpreter ends is ended there, by pthread_exit, which
# unwinds its stack. Where C++ of torch has released the lock, as its stores and groups do, that happens inside of a
# destructor, through which nothing may be unwound: "terminate called without an active exception", and SIGABRT after a
# program that has done all it should. So a thread that calls torch is told to stop, and waited for, while the
# interpreter still works. One that waits in a store which does not answer can't be told; it is left after a time, as
# the process ends long before an answer comes.
# Functions at exit run in reverse order: this one after the end of the launch, which asks the store itself.

_JOIN_SECONDS = 5.0

_lock = threading.Lock()
_threads: WeakKeyDictionary[threading.Thread, Callable[[], object] | None] = WeakKeyDictionary()


def join_at_exit(thread: threading.Thread, stop: Callable[[], object] | None = None) -> None:
    """Has a thread joined before the interpreter ends; see Note [Threads at exit].

    Args:
        thread: One that may call torch when the program ends.
        stop: Tells it to end, and does not refer to it; None: it ends by itself.
    """
    with _lock:
        _threads[thread] = stop


def _join_threads() -> None:
    with _lock:
        threads = dict(_threads)
    for stop in threads.values():
        if stop is not None:
            stop()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_join_threads)
