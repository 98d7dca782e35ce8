"""Joining of threads that call torch before the interpreter exits."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

# Note [Threads at exit]
# A daemon thread that requests the GIL while the interpreter exits is ended by pthread_exit, which unwinds its stack.
# Where C++ code of torch has released the GIL, as in its stores and groups, this happens inside of a destructor, which
# must not be unwound: "terminate called without an active exception", and SIGABRT after a program that succeeded. So
# threads that call torch are stopped and joined while the interpreter still runs. A thread that waits in a store which
# does not answer cannot be stopped; it is left after a timeout, since the process exits long before an answer.
# atexit functions run in reverse order: this one after the shutdown of the launch, which uses the store itself.

_JOIN_SECONDS = 5.0

_lock = threading.Lock()
_threads: WeakKeyDictionary[threading.Thread, Callable[[], object] | None] = WeakKeyDictionary()


def join_at_exit(thread: threading.Thread, stop: Callable[[], object] | None = None) -> None:
    """Join a thread before the interpreter exits; see Note [Threads at exit].

    Args:
        thread: Thread that may call torch when the program ends.
        stop: Function that makes the thread end; must not refer to it. Optional if it ends by itself.
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
