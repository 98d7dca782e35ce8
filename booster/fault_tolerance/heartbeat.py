"""Heartbeats: each rank's state in the store, once a second, for error messages about missing ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from booster.device import current_device, is_idle
from booster.errors import RankFailedError, format_list

from .progress import CollectiveInfo, Progress, current_progress
from .store import TimeoutStore, call_with_timeout
from .threads import join_at_exit
from .timeouts import timeouts

# Note [Heartbeats]
# A rank that is killed, stopped or hangs in C code cannot report its state. So a thread of every rank writes the
# progress of the thread that launched into the store of torch.distributed, every second. A rank that misses another one
# reads its last heartbeat, and whether heartbeats still arrive. No rank waits for a heartbeat. Only two facts, which
# are certain, decide anything: a process of this host has ended, and a rank reported that its program has ended, for
# which others might otherwise wait until their timeout.
# A backend that waits on an accelerator, as nccl does, raises nothing here: it aborts the process at the timeout of a
# collective and names no rank. So the thread of a rank that makes no progress ends the process with an error once it is
# certain that another rank is lost. Shortly before that timeout a rank without heartbeats counts as lost, too, and if
# none is, the thread prints the progress of all ranks.
# The thread has a separate client of the store: the main thread's may be in use. In a large world heartbeats are less
# frequent, so that the store serves a bounded number of them per second.

RUNNING, ENDED, FAILED = "running", "ended", "failed"

ANSWER_SECONDS = 3.0  # an error about a lost rank waits for the store as long as for the ranks

_INTERVAL_SECONDS = 1.0
_HEARTBEATS_PER_SECOND = 256
_EXITS_KEY = "exits"
_ACKNOWLEDGED_KEY = "known"
# A wait for a rank whose program has ended is aborted after this time: data which that rank sent before its end arrives
# sooner.
_ENDED_RANK_TIMEOUT_SECONDS = 5.0
_STALL_FRACTION = 0.9  # fraction of the training timeout without progress after which the thread prints a report
STALE_SECONDS = 30.0  # without a heartbeat, after which nothing is expected of a rank any more
_MAX_LISTED = 16  # ranks in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Last heartbeat of a rank.

    Attributes:
        sequence: Sequence number, from 1. If it increases, the process is alive.
        time: Time of the heartbeat in seconds since 1970, by the clock of its host.
        progress: Progress of the rank's main thread.
        state: "running", "ended" (the program finished) or "failed" (it raised an error).
        host: Host name.
        process_id: Process id on that host.
        host_id: Identifier that processes share only if they see each other's process ids.
        started_at: Start time of the process, by the clock of its host.
    """

    sequence: int
    time: float
    progress: Progress
    state: str
    host: str
    process_id: int
    host_id: str
    started_at: float


def start_heartbeat(
    on_ranks_ended: Callable[[Collection[int]], None], on_ranks_lost: Callable[[str, int], None]
) -> None:
    """Start the heartbeat thread for the current process group. Idempotent.

    Reports the progress of the calling thread. Every rank calls it; no communication with other ranks.

    Args:
        on_ranks_ended: Called by the heartbeat thread with the global ranks whose programs have ended, while this rank
            makes no progress: aborts the waits that these ranks cannot end.
        on_ranks_lost: Called where the backend waits on an accelerator, with the text about the lost ranks and the
            identifier of the thread that makes no progress: ends the process.

    Raises:
        RankFailedError: The process that serves the store has ended, or did not answer within the set-up timeout.
    """
    global _thread
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if _thread is None or not _thread.is_running_for(_get_default_store()):
        _thread = _HeartbeatThread(_get_default_store(), on_ranks_ended, on_ranks_lost)
        _thread.start()


def stop_heartbeat(state: str, text: str = "") -> None:
    """Write the last heartbeat of this rank's program.

    Args:
        state: "ended" or "failed".
        text: Reason of a failure.

    No communication with other ranks. Nothing is raised if the store is gone.
    """
    global _thread
    thread, _thread = _thread, None
    if thread is not None:
        thread.end(state, text)


def read_heartbeats(ranks: Iterable[int]) -> dict[int, Heartbeat]:
    """Return the last heartbeats of these global ranks, without those that never wrote one.

    Raises:
        RuntimeError: The process that serves the store has ended.
    """
    store = _heartbeat_store()
    return {rank: _heartbeat_from(store.get(str(rank))) for rank in ranks if store.check([str(rank)])}


def exit_statuses(store: TimeoutStore | None = None) -> dict[int, tuple[str, str]]:
    """Return state ("ended" or "failed") and reason of the ranks whose program is over. Raises as `read_heartbeats`.

    Args:
        store: Store of the heartbeats, optional; defaults to one with the main thread's client.
    """
    store = _heartbeat_store() if store is None else store
    if not store.check([_EXITS_KEY]):
        return {}
    entries = [json.loads(line) for line in store.get(_EXITS_KEY).splitlines()]
    return {rank: (state, text) for rank, state, text in entries}


def heartbeat_interval_text(world_size: int) -> str:
    """Return the heartbeat interval of a world as text."""
    seconds = heartbeat_interval(world_size)
    return "once a second" if seconds == 1 else f"every {seconds:.1f} s"


def heartbeat_interval(world_size: int) -> float:
    """Return the heartbeat interval of a world in seconds."""
    return _INTERVAL_SECONDS * max(1.0, world_size / _HEARTBEATS_PER_SECOND)


def acknowledge_exits() -> set[int]:
    """Record that this rank has read all exit states; return the ranks that have. Raises as `read_heartbeats`."""
    store = _heartbeat_store()
    store.append(_ACKNOWLEDGED_KEY, f"{dist.get_rank()}\n")
    return acknowledged_ranks()


def acknowledged_ranks() -> set[int]:
    """Return the ranks that have read all exit states. Raises as `read_heartbeats`."""
    return {int(line) for line in _heartbeat_store().get(_ACKNOWLEDGED_KEY).split()}


def ended_processes(heartbeats: Mapping[int, Heartbeat]) -> list[int]:
    """Return the ranks of this host whose processes have ended."""
    return [rank for rank, heartbeat in heartbeats.items() if heartbeat.host_id == host_id() and _is_gone(heartbeat)]


def progress_from_json(fields: Mapping[str, Any]) -> Progress:
    """Return the progress of which `asdict` gave these JSON values."""
    values = {**fields, "phases": tuple(fields["phases"])}
    for name in ("operation", "last_operation"):
        if values[name] is not None:
            values[name] = CollectiveInfo(**{**values[name], "ranks": tuple(values[name]["ranks"])})
    return Progress(**values)


class _HeartbeatThread:
    """Heartbeat thread of the thread that creates it; see Note [Heartbeats]."""

    def __init__(
        self,
        default: Any,
        on_ranks_ended: Callable[[Collection[int]], None],
        on_ranks_lost: Callable[[str, int], None],
    ) -> None:
        self._default = default  # Any: torch's stubs leave out methods of stores
        self._on_ranks_ended = on_ranks_ended
        self._on_ranks_lost = on_ranks_lost
        self._store = _heartbeat_store(_new_client(default))
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._observed_thread = threading.get_ident()
        self._process_id = os.getpid()
        self._identity = {
            "host": socket.gethostname(),
            "process_id": self._process_id,
            "host_id": host_id(),
            "started_at": psutil.Process().create_time(),
        }
        self._sequence = 0
        self._stall = _StallTimer()
        self._local_ranks: dict[int, Heartbeat] | None = None  # heartbeats of processes of this host, of any time
        self._backend = str(dist.get_backend())
        self._device = current_device()  # of the creating thread: each thread has its own
        self._lock = threading.Lock()  # one thread writes at a time, and the last heartbeat is written last
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="booster-heartbeat", daemon=True)

    def start(self) -> None:
        join_at_exit(self._thread, self._stopping.set)
        self._thread.start()

    def is_running_for(self, default: Store) -> bool:
        """Return whether it runs in this process, for the process group of this store."""
        return self._default is default and self._process_id == os.getpid() and self._thread.is_alive()

    def end(self, state: str, text: str) -> None:
        if self._process_id != os.getpid():  # a forked child is not a rank
            return
        self._stopping.set()
        with self._lock, suppress(RuntimeError):  # the process that serves the store has ended before this one
            self._write(state)
            self._store.append(_EXITS_KEY, json.dumps([self._rank, state, text]) + "\n")

    def _run(self) -> None:
        seconds = heartbeat_interval(self._size)
        is_first = True
        while is_first or not self._stopping.wait(seconds):
            is_first = False
            try:
                is_current = dist.is_initialized() and _get_default_store() is self._default
            except (RuntimeError, ValueError):  # the process group was destroyed between the two calls
                return
            if not is_current:
                return
            lost = ""
            with self._lock, suppress(RuntimeError):  # the store is gone, or will answer again later
                if not self._stopping.is_set():
                    self._write(RUNNING)
                    lost = self._check_stall(seconds)
            if lost:
                self._on_ranks_lost(lost, self._observed_thread)

    def _check_stall(self, seconds: float) -> str:
        """Abort waits for ended ranks, and report a stall that the backend will not explain.

        Returns:
            Text about the lost ranks that this rank waits for on an accelerator, or "".
        """
        progress, exits = self._progress(), exit_statuses(self._store)
        before = self._stall.seconds
        self._stall.update(progress, seconds, have_ended=bool(exits) and bool(progress.phases))
        if self._stall.seconds_with_ended >= _ENDED_RANK_TIMEOUT_SECONDS:
            self._stall.seconds_with_ended = 0.0
            self._on_ranks_ended(set(exits))
        if "gloo" in self._backend:
            return ""
        timeout = timeouts().training * _STALL_FRACTION
        is_late = before < timeout <= self._stall.seconds
        if self._stall.seconds >= min(timeout, _ENDED_RANK_TIMEOUT_SECONDS):
            lost = self._lost_ranks(exits, with_stale=is_late)
            # Outside of all phases the thread may compute, or wait for a collective's result, as in `loss.item()`. The
            # device is only asked when a rank is lost: the query would break a capture of a CUDA graph in that thread.
            if lost and (progress.phases or not is_idle(self._device)):
                return self._describe_lost(progress, lost)
        if is_late:
            sys.stderr.write(f"{self._stall_report()}\n")
        return ""

    def _lost_ranks(self, exits: Mapping[int, tuple[str, str]], *, with_stale: bool) -> dict[int, str]:
        """Return what is known of the ranks that this rank would wait for in vain, as text."""
        if self._local_ranks is None and self._store.check([str(rank) for rank in range(self._size)]):
            known = self._read_heartbeats()
            self._local_ranks = {rank: one for rank, one in known.items() if one.host_id == host_id()}
        local = self._local_ranks or {}
        lost = {
            rank: f"rank {rank}'s process {local[rank].process_id} has ended without a report (was it killed?)"
            for rank in ended_processes(local)
        }
        if with_stale:
            limit = min(STALE_SECONDS, timeouts().training / 2) + heartbeat_interval(self._size)
            for rank, one in self._read_heartbeats().items():
                age = time.time() - one.time  # by two hosts' clocks, whose difference in a cluster is much smaller
                if age > limit and rank not in lost:
                    lost[rank] = f"rank {rank} on host {one.host} has sent no heartbeat for {age:.0f} s"
        for rank, (state, text) in exits.items():
            lost[rank] = f"rank {rank}'s program {'ended' if state == ENDED else f'failed: {text}'}"
        return lost

    def _read_heartbeats(self) -> dict[int, Heartbeat]:
        return {rank: _heartbeat_from(self._store.get(str(rank))) for rank in range(self._size)}

    def _describe_lost(self, progress: Progress, lost: Mapping[int, str]) -> str:
        known = format_list(list(lost.values()), _MAX_LISTED)
        return (
            f"rank {self._rank} could not continue: {known}. No progress for {self._stall.seconds:.0f} s, {progress};"
            f" {self._backend} would abort the process after {timeouts().training:g} s without naming a rank"
        )

    def _stall_report(self) -> str:
        """Return the last heartbeats of all ranks as text."""
        heartbeats = {rank: self._store.get(str(rank)) for rank in range(min(self._size, _MAX_LISTED))}
        lines = [f"  rank {rank}: {_heartbeat_from(text).progress}" for rank, text in heartbeats.items()]
        more = [f"  and {self._size - _MAX_LISTED} more ranks"] if self._size > _MAX_LISTED else []
        head = (
            f"rank {self._rank}: no progress for {self._stall.seconds:.0f} s, and {self._backend} aborts a process"
            f" that waits for {timeouts().training:g} s in a collective. Progress by the ranks' last heartbeats:"
        )
        return "\n".join((head, *lines, *more))

    def _progress(self) -> Progress:
        return current_progress(self._observed_thread)

    def _write(self, state: str) -> None:
        self._sequence += 1
        progress = asdict(self._progress())
        heartbeat = {"sequence": self._sequence, "time": time.time(), "state": state, "progress": progress}
        heartbeat |= self._identity
        self._store.set(str(self._rank), json.dumps(heartbeat))


class _StallTimer:
    """Seconds that a thread has made no progress, in all and since some rank's program ended."""

    def __init__(self) -> None:
        self._last = Progress()  # without the time in its phase
        self.seconds = 0.0
        self.seconds_with_ended = 0.0

    def update(self, progress: Progress, seconds: float, *, have_ended: bool) -> None:
        """Update the seconds.

        Args:
            progress: Progress of the thread.
            seconds: Time since the last update.
            have_ended: If True, some rank's program has ended.
        """
        last, self._last = self._last, replace(progress, seconds=0.0)
        is_stalled = self._last == last
        self.seconds = self.seconds + seconds if is_stalled else 0.0
        self.seconds_with_ended = self.seconds_with_ended + seconds if is_stalled and have_ended else 0.0


def _new_client(default: Any) -> Any:
    try:
        return call_with_timeout(default.clone, timeouts().setup)
    except dist.DistError as error:
        raise RankFailedError(
            f"rank {dist.get_rank()} could not connect to the store of torch.distributed again: {error}. The process"
            " that serves it (rank 0 or the launcher) has ended, is stopped, or takes long to look up names: see its"
            " log, or launch with a larger setup_timeout_seconds=..."
        ) from error


def _heartbeat_store(client: Any = None) -> TimeoutStore:
    """Return the store of the heartbeats, by default with the main thread's client."""
    return TimeoutStore(_get_default_store() if client is None else client, "booster.heartbeats", ANSWER_SECONDS)


def _heartbeat_from(text: bytes) -> Heartbeat:
    fields = json.loads(text)
    return Heartbeat(**{**fields, "progress": progress_from_json(fields["progress"])})


@cache
def host_id() -> str:
    """Return an identifier that processes share only if they see each other's process ids."""
    try:
        namespace = os.stat("/proc/self/ns/pid")
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{namespace.st_ino}"
    except OSError:  # not Linux: each process is by itself
        return f"{socket.gethostname()}/{os.getpid()}"


def _is_gone(heartbeat: Heartbeat) -> bool:
    try:
        process = psutil.Process(heartbeat.process_id)
        return bool(process.create_time() != heartbeat.started_at or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


_thread: _HeartbeatThread | None = None
