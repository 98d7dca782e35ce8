"""Notices that no step ends, and says where every rank is."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed.distributed_c10d import _get_default_group

from booster.comm import group_rank, group_size, is_initialized
from booster.comm.notice_board import RankStore
from booster.monitor.whereabouts import Whereabouts, from_note, report, to_note
from booster.phases import Progress, current_progress
from booster.threads_at_exit import join_at_exit

__all__ = ["Watchdog"]

# Note [Watchdog]
# A thread of its own looks at the clock. When no step has ended for too long it prints what this process knows by
# itself: its threads' stacks and where it is. That needs nobody. Then it puts the same up for the others, waits a
# little for theirs, and prints who is missing. The ranks come to this at about the same time, as they step together.
# A rank whose main thread holds Python's lock for ever (in C code) stops this thread too. For that case the thread puts
# off, as long as it runs, an alarm of faulthandler's, which prints the stacks without the lock. The process has one
# such alarm: who uses faulthandler.dump_traceback_later besides finds it moved.

_POLLS = 8  # in the time that a hang takes
_MAX_POLL_SECONDS = 1.0
_MAX_GATHER_SECONDS = 5.0
_GATHER_POLL_SECONDS = 0.05
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<", os.path.dirname(os.__file__) + os.sep)


class Watchdog:
    """Watches the thread that starts it.

    Args:
        seconds: Without a step, after which it speaks.
        step: Returns the number of the last step that ended.

    Every rank makes one, at the same place.
    """

    def __init__(self, seconds: float, step: Callable[[], int]) -> None:
        self._seconds = seconds
        self._step = step
        self._board = RankStore("whereabouts")
        self._watched = threading.get_ident()
        self._stopping = threading.Event()
        self._last_beat = time.perf_counter()
        self._reported_beat: float | None = None
        self._thread = threading.Thread(target=self._run, name="booster-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._last_beat = time.perf_counter()
        join_at_exit(self._thread, self._stopping.set)
        self._thread.start()

    def step_ended(self) -> None:
        """Says that a step has ended."""
        self._last_beat = time.perf_counter()

    def stop(self) -> None:
        """Ends the watch, and tells others that wait that this rank has gone on."""
        self._stopping.set()
        self._thread.join(timeout=2 * _MAX_POLL_SECONDS)  # longer only where the store does not answer
        if not self._thread.is_alive():
            with suppress(RuntimeError):  # the process that serves the store has ended before this one
                self._board.set(to_note(self._whereabouts(has_left=True)))

    def _run(self) -> None:
        poll = min(self._seconds / _POLLS, _MAX_POLL_SECONDS)
        try:
            while not self._stopping.wait(poll):
                self._put_off_alarm()
                self._look()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _put_off_alarm(self) -> None:
        # Longer than this thread may be busy itself.
        seconds = self._seconds + _MAX_GATHER_SECONDS + 2 * _MAX_POLL_SECONDS
        faulthandler.dump_traceback_later(seconds, file=_stderr_number())

    def _look(self) -> None:
        beat = self._last_beat
        if beat == self._reported_beat:
            return
        if self._reported_beat is not None:
            self._reported_beat = None
            self._go_on()
        if time.perf_counter() - beat < self._seconds:
            return
        self._reported_beat = beat
        mine = self._whereabouts()
        # The stacks first: for all the rest the store has to answer.
        _print(f"{self._head(mine)}.\n  It {mine}.\n{_stacks(self._watched)}")
        everyone = self._everyone(mine)
        if everyone is None:
            _print(f"rank {group_rank()}: the store of torch.distributed does not answer: rank 0 or the launcher ended")
        elif group_size() > 1:
            _print(f"{self._head(mine)}. Who is where:\n{report(everyone, group_size())}")

    def _head(self, mine: Whereabouts) -> str:
        return f"rank {group_rank()} of {group_size()}: no step has ended for {mine.idle_seconds:.1f} s"

    def _go_on(self) -> None:
        with suppress(RuntimeError):  # what ends the store will be seen by who needs it
            self._board.delete()

    def _everyone(self, mine: Whereabouts) -> dict[int, Whereabouts] | None:
        """Returns what the ranks say that are not much later with it than this one; None: the store is gone."""
        deadline = time.perf_counter() + min(max(self._seconds, 1.0), _MAX_GATHER_SECONDS)
        try:
            self._board.set(to_note(mine))
            notes = self._board.get_all()
            while len(notes) < group_size() and time.perf_counter() < deadline:
                if self._stopping.wait(_GATHER_POLL_SECONDS):
                    break
                notes = self._board.get_all()
        except RuntimeError:
            return None
        return {**{rank: from_note(note) for rank, note in notes.items()}, group_rank(): mine}

    def _whereabouts(self, has_left: bool = False) -> Whereabouts:
        frame = sys._current_frames().get(self._watched)
        return Whereabouts(
            step=self._step(),
            idle_seconds=time.perf_counter() - self._last_beat,
            place=Progress() if has_left else current_progress(self._watched),
            line="" if has_left else _users_line(frame),
            num_collectives=_num_collectives(),
            has_left=has_left,
        )


def _num_collectives() -> int | None:
    """See Note [Collectives of torch]."""
    if not is_initialized() or group_size() == 1:
        return None
    with suppress(RuntimeError, AttributeError):  # a backend that has no such count
        group: Any = _get_default_group()  # torch's stubs leave the count out
        return int(group._get_sequence_number_for_group())
    return None


def _users_line(frame: FrameType | None) -> str:
    """Returns the innermost line that is neither this library's nor one of those that it is built on."""
    while frame is not None:
        path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] != "booster" and not any(part in path for part in _LIBRARIES):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _stacks(first: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    parts = []
    for thread_id in sorted(frames, key=lambda one: one != first):
        stack = "".join(traceback.format_stack(frames[thread_id])).rstrip()
        parts.append(f"thread {names.get(thread_id, thread_id)}:\n{stack}")
    return "Its threads' stacks, innermost call last:\n" + "\n".join(parts)


def _print(text: str) -> None:
    """Writes at once, so that lines of several ranks are not mixed."""
    with suppress(OSError, ValueError):  # nobody reads any more
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def _stderr_number() -> int:
    with suppress(OSError, ValueError, AttributeError):  # replaced by something without a file
        return sys.stderr.fileno()
    return 2
