"""A launcher that is told to end does so, also where torch's code waits and lets no signal handler run."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

__all__ = ["ends_when_told"]

# Note [Ending while torch waits]
# torch's agent turns signals into an exception once ranks run, and ends them in order. Before, a launcher waits for the
# others in code that lets no Python run for up to 15 minutes: a handler that Python has called remains unnoticed there.
# So a thread watches, too: some seconds after a signal, a launcher that has no ranks to end is ended by that thread,
# and one that has is given the time that torch allows its ranks.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ALONE_SECONDS = 2.0
_RANKS_SECONDS = 45.0  # torch gives ranks 30 s before it kills them


@contextmanager
def ends_when_told(*, by_fd: int | None, clean_up: Callable[[], None]) -> Iterator[None]:
    """Ends the process and its ranks at a signal, or as the other side of a pipe closes, even if torch is waiting.

    Must be entered in the main thread.

    Args:
        by_fd: A descriptor for reading; its end counts as SIGTERM, and nothing is said, as who closed it knows. None
            for signals alone.
        clean_up: Called before the process is ended in the middle of something.
    """
    done = threading.Event()
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    handlers = {number: signal.signal(number, _raise) for number in _SIGNALS}
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(woken, by_fd, done, clean_up), name="ends_when_told", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(wake)  # the watcher sees the end of the pipe
        watcher.join()
        os.close(woken)


def _raise(number: int, _: FrameType | None) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException(f"told to end by signal {number}", signal.Signals(number))


def _watch(woken: int, by_fd: int | None, done: threading.Event, clean_up: Callable[[], None]) -> None:
    number = _first_signal(woken, by_fd, done)
    if number is None:
        return
    is_said = by_fd is None
    if not done.wait(_ALONE_SECONDS) and not _has_ranks():
        _end(number, clean_up, is_said)
    deadline = time.monotonic() + _RANKS_SECONDS
    while not done.wait(0.2):
        if not _has_ranks() or time.monotonic() > deadline:
            # Once more: the ranks may have ended just now, and the main thread is about to say how.
            if done.wait(_ALONE_SECONDS):
                return
            _end(number, clean_up, is_said)


def _first_signal(woken: int, by_fd: int | None, done: threading.Event) -> signal.Signals | None:
    """Waits for a signal or the end of the pipe, and returns which signal it was; None if all is done."""
    poll = select.poll()
    for fd in (woken, by_fd):
        if fd is not None:
            poll.register(fd, select.POLLIN)
    while not done.is_set():
        for fd, _ in poll.poll():
            read = os.read(fd, 64)
            if fd == by_fd and not read:
                os.kill(os.getpid(), signal.SIGTERM)
                return signal.SIGTERM
            told = [number for number in read if number in _SIGNALS] if fd == woken else []
            if told:
                return signal.Signals(told[0])
    return None


def _has_ranks() -> bool:
    return bool(psutil.Process().children())


def _end(number: signal.Signals, clean_up: Callable[[], None], is_said: bool) -> None:
    for child in psutil.Process().children():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # torch makes every rank the leader of its own
    clean_up()
    if is_said:
        print(f"booster run: ended by {number.name}, and all ranks with it", file=sys.stderr, flush=True)
    os._exit(128 + number)
