"""Keeps Ctrl-C out of the moments in which two things that belong together differ."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["interrupts_later"]


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Has a SIGINT that comes inside take effect at the end; for a few milliseconds at most.

    Python only ever handles signals in the main thread, so that nothing is to be done in others.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])
