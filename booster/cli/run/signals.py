"""Termination of the launcher by signals, also while torch blocks in C++ and no Python handler runs."""

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

# While ranks run, torch's agent turns signals into an exception and terminates the ranks in order. Before that, the
# rendezvous blocks in C++ for up to 15 minutes, where no Python signal handler runs. So a thread watches for signals as
# well: if the launcher has no ranks to terminate, the thread ends the process some seconds after the signal.
_NO_RANKS_SECONDS = 2.0


def termination_signals() -> list[signal.Signals]:
    """Return the signals that terminate a run: without SIGHUP if it is ignored, as under nohup."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*signals, signal.SIGHUP]


@contextmanager
def terminate_on_signal(*, stdin_fd: int | None, clean_up: Callable[[], None]) -> Iterator[None]:
    """Terminate this process and its ranks at a signal or at EOF of a pipe, even while torch blocks.

    EOF of `stdin_fd`, if given, counts as SIGTERM and prints no message. `clean_up` is called before the process is
    killed by the watching thread. Must be entered in the main thread.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    done = threading.Event()
    wake_read_fd, wake_fd = os.pipe()
    for fd in (wake_read_fd, wake_fd):
        os.set_blocking(fd, False)

    def end(number: int, _: FrameType | None) -> None:
        if not done.is_set():
            raise SignalException(f"terminated by signal {number}", signal.Signals(number))

    handlers = {number: signal.signal(number, end) for number in termination_signals()}
    previous_fd = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    watch_thread = threading.Thread(
        target=_watch, args=(wake_read_fd, stdin_fd, done, clean_up), name="booster-signals", daemon=True
    )
    watch_thread.start()
    try:
        yield
    finally:
        done.set()
        for number in handlers:  # torch has installed its own, and the watcher may be about to send a signal
            signal.signal(number, end)
        signal.set_wakeup_fd(previous_fd)
        os.close(wake_fd)  # the watcher sees the end of the pipe
        watch_thread.join()
        os.close(wake_read_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _watch(wake_read_fd: int, stdin_fd: int | None, done: threading.Event, clean_up: Callable[[], None]) -> None:
    number = _first_signal(wake_read_fd, stdin_fd, done)
    if number is None:
        return
    while not done.wait(_NO_RANKS_SECONDS):
        # Checked twice: the ranks may have exited just now, and the main thread is about to report it.
        if not _has_ranks() and not done.wait(_NO_RANKS_SECONDS):
            clean_up()
            if stdin_fd is None:
                print(f"booster run: ended by {number.name}, and all ranks with it", file=sys.stderr, flush=True)
            os._exit(128 + number)


def _first_signal(wake_read_fd: int, stdin_fd: int | None, done: threading.Event) -> signal.Signals | None:
    """Wait for a signal or EOF of the pipe and return the signal, or None if `done` is set."""
    poll = select.poll()
    for fd in (wake_read_fd, stdin_fd):
        if fd is not None:
            poll.register(fd, select.POLLIN)
    while not done.is_set():
        for fd, _ in poll.poll():
            read = os.read(fd, 64)
            if fd == stdin_fd and not read:
                os.kill(os.getpid(), signal.SIGTERM)
                return signal.SIGTERM
            received = [number for number in read if number in termination_signals()] if fd == wake_read_fd else []
            if received:
                return signal.Signals(received[0])
    return None


def _has_ranks() -> bool:
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:  # a zombie exited, but the main thread did not reap it yet
                return True
    return False
