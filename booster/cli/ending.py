"""A launcher that is told to end does so, also where torch's code waits and lets no signal handler run."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

__all__ = ["ending_signals", "ends_when_told"]

# Note [Ending while torch waits]
# torch's agent turns signals into an exception once ranks run, and ends them in order. Before, a launcher waits for the
# others in code that lets no Python run for up to 15 minutes: a handler that Python has called remains unnoticed there.
# So a thread watches, too: some seconds after a signal, a launcher that has no ranks to end is ended by that thread.
# One that has ranks is in torch's agent, which gives them time and then kills them.
_ALONE_SECONDS = 2.0


def ending_signals() -> list[signal.Signals]:
    """Returns the signals that end a run: not the terminal's going away where nohup told this process to ignore it."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*signals, signal.SIGHUP]


@contextmanager
def ends_when_told(*, by_fd: int | None, clean_up: Callable[[], None]) -> Iterator[None]:
    """Ends the process and its ranks at a signal, or as the other side of a pipe closes, even if torch is waiting.

    Must be entered in the main thread.

    Args:
        by_fd: A descriptor for reading; its end counts as SIGTERM, and nothing is said, as who closed it knows. None
            for signals alone.
        clean_up: Called before the process is ended in the middle of something.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    done = threading.Event()
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)

    def end(number: int, _: FrameType | None) -> None:
        if not done.is_set():
            raise SignalException(f"told to end by signal {number}", signal.Signals(number))

    handlers = {number: signal.signal(number, end) for number in ending_signals()}
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(woken, by_fd, done, clean_up), name="ends_when_told", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        for number in handlers:  # torch has set its own, and the watcher may be about to send the last signal
            signal.signal(number, end)
        signal.set_wakeup_fd(before)
        os.close(wake)  # the watcher sees the end of the pipe
        watcher.join()
        os.close(woken)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _watch(woken: int, by_fd: int | None, done: threading.Event, clean_up: Callable[[], None]) -> None:
    number = _first_signal(woken, by_fd, done)
    if number is None:
        return
    while not done.wait(_ALONE_SECONDS):
        # Twice, as the ranks may have ended just now, and the main thread is about to say how.
        if not _has_ranks() and not done.wait(_ALONE_SECONDS):
            clean_up()
            if by_fd is None:
                print(f"booster run: ended by {number.name}, and all ranks with it", file=sys.stderr, flush=True)
            os._exit(128 + number)


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
            told = [number for number in read if number in ending_signals()] if fd == woken else []
            if told:
                return signal.Signals(told[0])
    return None


def _has_ranks() -> bool:
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:  # else it ended, and the main thread did not look yet
                return True
    return False
