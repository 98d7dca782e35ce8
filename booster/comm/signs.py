"""Heartbeats: each rank's state in the store, once a second, for error messages about missing ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from booster.comm.bounded_store import BoundedStore, new_client
from booster.errors import RankFailedError
from booster.phases import CurrentPlace, OperationPlace, current_place
from booster.threads_at_exit import join_at_exit
from booster.time_limits import time_limits

__all__ = [
    "ANSWER_SECONDS",
    "ENDED",
    "FAILED",
    "Sign",
    "end_signs",
    "ended_processes",
    "ends_of_ranks",
    "how_often",
    "place_as_json",
    "place_from_json",
    "ranks_that_know_ends",
    "read_signs",
    "say_that_ends_are_known",
    "start_signs",
]

# Note [Signs]
# A rank that is killed, stopped or hangs in C code cannot report its state. So a thread of every rank writes the
# progress of the thread that launched into the store of torch.distributed, every second. A rank that misses another one
# reads its last heartbeat, and whether heartbeats still arrive. No rank waits for a heartbeat. Only two facts, which
# are certain, decide anything: a process of this host has ended, and a rank reported that its program has ended, for
# which others might otherwise wait until their timeout.
# A backend that waits on an accelerator, as nccl does, raises nothing here: it aborts the process at the timeout of a
# collective and names no rank. Shortly before that the thread prints the progress of all ranks.
# The thread has a separate client of the store: the main thread's may be in use. In a large world heartbeats are less
# frequent, so that the store serves a bounded number of them per second.

RUNNING, ENDED, FAILED = "running", "ended", "failed"

ANSWER_SECONDS = 3.0  # an error about a lost rank waits for the store as long as for the ranks

_SECONDS = 1.0
_SIGNS_A_SECOND = 256
_ENDS_KEY = "ends"
_KNOWN_KEY = "known"
# A wait for a rank whose program has ended is aborted after this time: data which that rank sent before its end arrives
# sooner.
_PATIENCE_WITH_ENDED_SECONDS = 5.0
_PART_OF_LIMIT = 0.9  # fraction of the training timeout without progress after which the thread prints a report
_MAX_LISTED = 16  # ranks in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Last heartbeat of a rank.

    Attributes:
        beat: Sequence number, from 1. If it increases, the process is alive.
        at: Time of the heartbeat in seconds since 1970, by the clock of its host.
        place: Progress of the rank's main thread.
        state: "running", "ended" (the program finished) or "failed" (it raised an error).
        host: Host name.
        process_id: Process id on that host.
        machine: Identifier that processes share only if they see each other's process ids.
        born: Start time of the process, by the clock of its host.
    """

    beat: int
    at: float
    place: CurrentPlace
    state: str
    host: str
    process_id: int
    machine: str
    born: float


def start_signs() -> None:
    """Start the heartbeat thread for the current process group. Idempotent.

    Reports the progress of the calling thread. Every rank calls it; no communication with other ranks.

    Raises:
        RankFailedError: The process that serves the store has ended, or did not answer within the set-up timeout.
    """
    global _speaker
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if _speaker is None or not _speaker.is_speaking_of(_get_default_store()):
        _speaker = _Speaker(_get_default_store())
        _speaker.start()


def end_signs(state: str, text: str = "") -> None:
    """Write the last heartbeat of this rank's program.

    Args:
        state: "ended" or "failed".
        text: Reason of a failure.

    No communication with other ranks. Nothing is raised if the store is gone.
    """
    global _speaker
    speaker, _speaker = _speaker, None
    if speaker is not None:
        speaker.end(state, text)


def read_signs(ranks: Iterable[int]) -> dict[int, Sign]:
    """Return the last heartbeats of these global ranks, without those that never wrote one.

    Raises:
        RuntimeError: The process that serves the store has ended.
    """
    store = _signs_store(_get_default_store())
    return {rank: _sign_from(store.get(str(rank))) for rank in ranks if store.check([str(rank)])}


def ends_of_ranks() -> dict[int, tuple[str, str]]:
    """Return state ("ended" or "failed") and reason of the ranks whose program is over. Raises as `read_signs`."""
    return _ends(_signs_store(_get_default_store()))


def how_often(world_size: int) -> str:
    """Return the heartbeat interval of a world as text."""
    seconds = _seconds_between(world_size)
    return "once a second" if seconds == 1 else f"every {seconds:.1f} s"


def _seconds_between(world_size: int) -> float:
    return _SECONDS * max(1.0, world_size / _SIGNS_A_SECOND)


def say_that_ends_are_known() -> set[int]:
    """Record that this rank has read all exit states; return the ranks that have. Raises as `read_signs`."""
    store = _signs_store(_get_default_store())
    store.append(_KNOWN_KEY, f"{dist.get_rank()}\n")
    return ranks_that_know_ends()


def ranks_that_know_ends() -> set[int]:
    """Return the ranks that have read all exit states. Raises as `read_signs`."""
    return {int(line) for line in _signs_store(_get_default_store()).get(_KNOWN_KEY).split()}


def ended_processes(signs: Mapping[int, Sign]) -> list[int]:
    """Return the ranks of this host whose processes have ended."""
    return [rank for rank, sign in signs.items() if sign.machine == _machine() and _is_gone(sign)]


def place_as_json(place: CurrentPlace) -> dict[str, Any]:
    """Return progress as JSON values."""
    return asdict(place)


def place_from_json(fields: Mapping[str, Any]) -> CurrentPlace:
    """Inverse of `place_as_json`."""
    place = {**fields, "phases": tuple(fields["phases"])}
    for name in ("operation", "last_operation"):
        if place[name] is not None:
            place[name] = OperationPlace(**{**place[name], "ranks": tuple(place[name]["ranks"])})
    return CurrentPlace(**place)


class _Speaker:
    """Heartbeat thread of the thread that creates it; see Note [Signs]."""

    def __init__(self, default: Any) -> None:
        self._default = default  # Any: torch's stubs leave out methods of stores
        self._store = _signs_store(_client_of(default))
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._watched = threading.get_ident()
        self._process_id = os.getpid()
        self._who = {
            "host": socket.gethostname(),
            "process_id": self._process_id,
            "machine": _machine(),
            "born": psutil.Process().create_time(),
        }
        self._beat = 0
        self._stands = _Standing(CurrentPlace())
        self._backend = str(dist.get_backend())
        self._lock = threading.Lock()  # one thread writes at a time, and the last heartbeat is written last
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="booster-signs", daemon=True)

    def start(self) -> None:
        join_at_exit(self._thread, self._stopping.set)
        self._thread.start()

    def is_speaking_of(self, default: Store) -> bool:
        """Return whether it runs in this process, for the process group of this store."""
        return self._default is default and self._process_id == os.getpid() and self._thread.is_alive()

    def end(self, state: str, text: str) -> None:
        """Write the last heartbeat."""
        if self._process_id != os.getpid():  # a forked child is not a rank
            return
        self._stopping.set()
        with self._lock, suppress(RuntimeError):  # the process that serves the store has ended before this one
            self._say(state)
            self._store.append(_ENDS_KEY, json.dumps([self._rank, state, text]) + "\n")

    def _run(self) -> None:
        seconds = _seconds_between(self._size)
        is_first = True
        while is_first or not self._stopping.wait(seconds):
            is_first = False
            if not self._is_of_now():
                return
            with self._lock, suppress(RuntimeError):  # the store is gone, or will answer again later
                if not self._stopping.is_set():
                    self._say(RUNNING)
                    self._look(seconds)

    def _look(self, seconds: float) -> None:
        """Abort waits for ended ranks, and report a stall before the backend aborts the process."""
        place, ended = self._place(), set(_ends(self._store))
        before = self._stands.seconds
        self._stands.look(place, seconds, have_ended=bool(ended) and bool(place.phases))
        if self._stands.seconds_with_ended >= _PATIENCE_WITH_ENDED_SECONDS:
            self._stands.seconds_with_ended = 0.0
            from booster.comm.waiting import break_off

            break_off(ended)
        limit = time_limits().training * _PART_OF_LIMIT
        if before < limit <= self._stands.seconds and "gloo" not in self._backend:
            sys.stderr.write(f"{self._standstill()}\n")

    def _standstill(self) -> str:
        """Return the stall report: the last heartbeats of all ranks."""
        signs = {rank: self._store.get(str(rank)) for rank in range(min(self._size, _MAX_LISTED))}
        lines = [f"  rank {rank}: {_sign_from(note).place}" for rank, note in signs.items()]
        more = [f"  and {self._size - _MAX_LISTED} more ranks"] if self._size > _MAX_LISTED else []
        head = (
            f"rank {self._rank}: no progress for {self._stands.seconds:.0f} s, and {self._backend} aborts a process"
            f" that waits for {time_limits().training:g} s in a collective. Progress by the ranks' last heartbeats:"
        )
        return "\n".join((head, *lines, *more))

    def _is_of_now(self) -> bool:
        try:
            return dist.is_initialized() and _get_default_store() is self._default
        except (RuntimeError, ValueError):  # the process group was destroyed between the two calls
            return False

    def _place(self) -> CurrentPlace:
        return current_place(self._watched)

    def _say(self, state: str) -> None:
        self._beat += 1
        place = place_as_json(self._place())
        note = {"beat": self._beat, "at": time.time(), "state": state, "place": place, **self._who}
        self._store.set(str(self._rank), json.dumps(note))


class _Standing:
    """Seconds that a thread has made no progress, in all and since some rank's program ended."""

    def __init__(self, place: CurrentPlace) -> None:
        self._mark = self._mark_of(place)
        self.seconds = 0.0
        self.seconds_with_ended = 0.0

    def look(self, place: CurrentPlace, seconds: float, *, have_ended: bool) -> None:
        """Update the seconds.

        Args:
            place: Progress of the thread.
            seconds: Time since the last update.
            have_ended: If True, some rank's program has ended.
        """
        mark = self._mark_of(place)
        stands, self._mark = mark == self._mark, mark
        self.seconds = self.seconds + seconds if stands else 0.0
        self.seconds_with_ended = self.seconds_with_ended + seconds if stands and have_ended else 0.0

    @staticmethod
    def _mark_of(place: CurrentPlace) -> tuple[object, ...]:
        return place.num_steps, place.phases, place.operation, place.last_operation


def _client_of(default: Any) -> Any:
    try:
        return new_client(default, time_limits().setup)
    except dist.DistError as error:
        raise RankFailedError(
            f"rank {dist.get_rank()} could not connect to the store of torch.distributed again: {error}. The process"
            " that serves it (rank 0 or the launcher) has ended, is stopped, or takes long to look up names: see its"
            " log, or launch with a larger setup_timeout_seconds=..."
        ) from error


def _signs_store(client: Any) -> BoundedStore:
    return BoundedStore(client, "booster.signs", ANSWER_SECONDS)


def _sign_from(note: bytes) -> Sign:
    fields = json.loads(note)
    return Sign(**{**fields, "place": place_from_json(fields["place"])})


def _ends(store: BoundedStore) -> dict[int, tuple[str, str]]:
    if not store.check([_ENDS_KEY]):
        return {}
    entries = [json.loads(line) for line in store.get(_ENDS_KEY).splitlines()]
    return {rank: (state, text) for rank, state, text in entries}


@cache
def _machine() -> str:
    """Return an identifier that processes share only if they see each other's process ids."""
    try:
        namespace = os.stat("/proc/self/ns/pid")
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{namespace.st_ino}"
    except OSError:  # not Linux: each process is by itself
        return f"{socket.gethostname()}/{os.getpid()}"


def _is_gone(sign: Sign) -> bool:
    try:
        process = psutil.Process(sign.process_id)
        return bool(process.create_time() != sign.born or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


_speaker: _Speaker | None = None
