"""Handling of Ctrl-C, which reaches all processes of a terminal: only the parent acts on it and terminates the rest."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["defer_sigint", "ignore_sigint"]


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Make processes started within the block, and their descendants, ignore SIGINT permanently."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Defer SIGINT to the end of the block, as a half-started process would print an error about its pipe.

    Raises:
        KeyboardInterrupt: SIGINT was received within the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda *_: received.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received.is_set():
        raise KeyboardInterrupt
