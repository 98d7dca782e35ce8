"""Hang detection: reports the status of every rank when no step finishes."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from torch.distributed.distributed_c10d import _get_default_group

from booster.comm import group_rank, group_size, is_initialized
from booster.comm.store_barrier import RankStore
from booster.errors import format_ranks
from booster.fault_tolerance.heartbeat import progress_from_json
from booster.fault_tolerance.progress import CollectiveInfo, Progress, current_progress
from booster.fault_tolerance.threads import join_at_exit

_MAX_RANKS = 16  # in a report


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Status of a rank during a hang.

    Attributes:
        step: Last finished step.
        idle_seconds: Seconds since that step finished.
        progress: Current phase and collective.
        line: Innermost line of user code of the training thread.
        num_collectives: Number of collectives that torch's backend has started in the world group on this rank, by
            this library or not. None if the backend does not count.
        has_left: Whether the rank has left the Monitor's block.
    """

    step: int
    idle_seconds: float
    progress: Progress
    line: str = ""
    num_collectives: int | None = None
    has_left: bool = False

    def __str__(self) -> str:
        if self.has_left:
            return f"left the Monitor's block after step {self.step}"
        at = f"; at {self.line}" if self.line else ""
        return f"finished step {self.step} and is {self.progress.describe()}{at}"


def status_to_json(status: RankStatus) -> str:
    return json.dumps(asdict(status))


def status_from_json(text: str) -> RankStatus:
    fields = json.loads(text)
    return RankStatus(**{**fields, "progress": progress_from_json(fields["progress"])})


def format_report(statuses: Mapping[int, RankStatus], num_ranks: int) -> str:
    """Format the ranks missing from each pending collective, and the status of every rank.

    Args:
        statuses: Status by world rank, without ranks that did not respond.
        num_ranks: World size.
    """
    waiting: dict[tuple[object, ...], list[int]] = {}
    for rank, status in sorted(statuses.items()):
        operation = status.progress.operation
        if operation is not None:  # both ends of a point-to-point message are listed separately
            waiting.setdefault((operation, None if operation.peer is None else rank), []).append(rank)
    lines = [_format_missing(ranks, statuses) for ranks in list(waiting.values())[:_MAX_RANKS]]
    if not lines:
        lines.append(_format_behind(statuses) or "no rank is in a collective of this library")
    for other in sorted(range(num_ranks), key=lambda one: (one in statuses, one))[:_MAX_RANKS]:
        lines.append(f"rank {other} " + (str(statuses[other]) if other in statuses else "did not report: see its log"))
    if num_ranks > _MAX_RANKS:
        lines.append(f"and {num_ranks - _MAX_RANKS} more ranks")
    return "\n".join(f"  {line}" for line in lines)


def _format_missing(waiting: Sequence[int], statuses: Mapping[int, RankStatus]) -> str:
    """Format the ranks that have not entered the collective in which `waiting` wait."""
    rank, collective = waiting[0], statuses[waiting[0]].progress.operation
    assert collective is not None
    ranks = collective.ranks if collective.peer is None else (collective.peer,)
    missing = [other for other in ranks if other != rank and not _has_entered(collective, rank, statuses.get(other))]
    head = f"{format_ranks(waiting, _MAX_RANKS)} {'wait' if len(waiting) > 1 else 'waits'} in {collective}"
    entered = f"missing: {format_ranks(missing, _MAX_RANKS)}" if missing else "all its ranks have entered it"
    return f"{head}; {entered}"


def _has_entered(collective: CollectiveInfo, rank: int, other: RankStatus | None) -> bool:
    """Return whether another rank is in the same collective or has finished it."""
    if other is None:
        return False
    name = {"send": "receive", "receive": "send"}.get(collective.name, collective.name)
    peer = None if collective.peer is None else rank
    entered = [one for one in (other.progress.operation, other.progress.last_operation) if one is not None]
    same = [one for one in entered if (one.name, one.ranks, one.peer) == (name, collective.ranks, peer)]
    return any(one.number >= collective.number for one in same)


# Collectives of FSDP2 and of user code bypass booster.comm, so a rank may hang in one without a CollectiveInfo. The
# backend counts the collectives that it has started, in the same order on every rank: the ranks with a lower count are
# the ones that the others wait for.


def _format_behind(statuses: Mapping[int, RankStatus]) -> str:
    """Format the ranks that have started fewer collectives than others; empty if there are none."""
    counts = {rank: one.num_collectives for rank, one in statuses.items() if one.num_collectives is not None}
    most = max(counts.values(), default=0)
    behind = [rank for rank, count in counts.items() if count < most]
    if not behind:
        return ""
    listed = ", ".join(f"rank {rank} ({counts[rank]})" for rank in behind[:_MAX_RANKS])
    return f"torch's backend has started {most} collectives of the world group on some ranks; missing: {listed}"


# Note [Watchdog]
# A dedicated thread checks the time since the last step. After the timeout it first prints the local state (thread
# stacks and status), which needs no communication. Then it publishes the status in the store, polls briefly for the
# status of the other ranks, and prints the missing ranks. All ranks time out at about the same time, as they step
# together.
# A main thread that holds the GIL forever (in C code) also stops this thread. For that case the thread keeps postponing
# a faulthandler timer, which dumps the stacks without the GIL. A process has only one such timer, so user code that
# calls faulthandler.dump_traceback_later loses its own.

_POLLS = 8  # per timeout
_MAX_POLL_SECONDS = 1.0
_MAX_GATHER_SECONDS = 5.0
_GATHER_POLL_SECONDS = 0.05
_LIBRARY_PATHS = ("/site-packages/", "/dist-packages/", "<", os.path.dirname(os.__file__) + os.sep)


class Watchdog:
    """Hang detector of the thread that creates it. Every rank creates one at the same point.

    Args:
        seconds: Timeout without a finished step.
        step: Callable that returns the number of the last finished step.
    """

    def __init__(self, seconds: float, step: Callable[[], int]) -> None:
        self._seconds = seconds
        self._step = step
        self._store = RankStore("progress_reports")
        self._watched_thread = threading.get_ident()
        self._stopping = threading.Event()
        self._last_step_time = time.perf_counter()
        self._reported_step_time: float | None = None
        self._thread = threading.Thread(target=self._run, name="booster-watchdog", daemon=True)

    def start(self) -> None:
        self._last_step_time = time.perf_counter()
        join_at_exit(self._thread, self._stopping.set)
        self._thread.start()

    def on_step_end(self) -> None:
        self._last_step_time = time.perf_counter()

    def stop(self) -> None:
        """Stop the thread, and publish that this rank has left the block."""
        self._stopping.set()
        self._thread.join(timeout=2 * _MAX_POLL_SECONDS)  # takes longer only if the store does not respond
        if not self._thread.is_alive():
            with suppress(RuntimeError):  # the process that hosts the store has exited
                self._store.set(status_to_json(self._status(has_left=True)))

    def _run(self) -> None:
        poll = min(self._seconds / _POLLS, _MAX_POLL_SECONDS)
        # Longer than one iteration of this thread can take.
        dump_seconds = self._seconds + _MAX_GATHER_SECONDS + 2 * _MAX_POLL_SECONDS
        try:
            while not self._stopping.wait(poll):
                faulthandler.dump_traceback_later(dump_seconds, file=_stderr_fd())  # postpones the last one
                self._check()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _check(self) -> None:
        last_step_time = self._last_step_time
        if last_step_time == self._reported_step_time:
            return
        if self._reported_step_time is not None:
            self._reported_step_time = None
            with suppress(RuntimeError):  # a lost store raises where it is needed
                self._store.delete()
        if time.perf_counter() - last_step_time < self._seconds:
            return
        self._reported_step_time = last_step_time
        own = self._status()
        # Stacks first: everything else needs the store.
        _print(f"{self._head(own)}.\n  It {own}.\n{_stacks(self._watched_thread)}")
        statuses = self._gather_statuses(own)
        if statuses is None:
            _print(f"rank {group_rank()}: the torch.distributed store does not respond: rank 0 or the launcher exited")
        elif group_size() > 1:
            _print(f"{self._head(own)}. Status of the ranks:\n{format_report(statuses, group_size())}")

    def _head(self, mine: RankStatus) -> str:
        return f"rank {group_rank()} of {group_size()}: no step finished for {mine.idle_seconds:.1f} s"

    def _gather_statuses(self, own: RankStatus) -> dict[int, RankStatus] | None:
        """Collect the statuses published within the gather timeout; None if the store is lost."""
        deadline = time.perf_counter() + min(max(self._seconds, 1.0), _MAX_GATHER_SECONDS)
        try:
            self._store.set(status_to_json(own))
            texts = self._store.get_all()
            while len(texts) < group_size() and time.perf_counter() < deadline:
                if self._stopping.wait(_GATHER_POLL_SECONDS):
                    break
                texts = self._store.get_all()
        except RuntimeError:
            return None
        return {**{rank: status_from_json(note) for rank, note in texts.items()}, group_rank(): own}

    def _status(self, has_left: bool = False) -> RankStatus:
        frame = sys._current_frames().get(self._watched_thread)
        return RankStatus(
            step=self._step(),
            idle_seconds=time.perf_counter() - self._last_step_time,
            progress=Progress() if has_left else current_progress(self._watched_thread),
            line="" if has_left else _user_line(frame),
            num_collectives=_num_collectives(),
            has_left=has_left,
        )


def _num_collectives() -> int | None:
    if not is_initialized() or group_size() == 1:
        return None
    with suppress(RuntimeError, AttributeError):  # a backend without sequence numbers
        group: Any = _get_default_group()  # the method is missing in torch's stubs
        return int(group._get_sequence_number_for_group())
    return None


def _user_line(frame: FrameType | None) -> str:
    """Return the innermost line outside this library and installed packages."""
    while frame is not None:
        path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] != "booster" and not any(part in path for part in _LIBRARY_PATHS):
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
    return "Thread stacks, most recent call last:\n" + "\n".join(parts)


def _print(text: str) -> None:
    # One write, so that lines of several ranks do not interleave.
    with suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def _stderr_fd() -> int:
    with suppress(OSError, ValueError, AttributeError):  # stderr is replaced by an object without a file descriptor
        return sys.stderr.fileno()
    return 2
