"""Ctrl-C: it reaches all processes of a terminal, and the one at the top ends the others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interrupts_deferred", "interrupts_ignored"]


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Has processes that are started within the block, and all that those start, ignore Ctrl-C for good."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set how signals are handled
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Lets a Ctrl-C within the block count at its end: a process that is half started would complain of its pipe.

    Raises:
        KeyboardInterrupt: At the end, where there was one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_come = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda *_: has_come.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if has_come.is_set():
        raise KeyboardInterrupt
