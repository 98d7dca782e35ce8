"""Signs: what each rank says of itself once a second, for those who miss it later."""

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
# A rank that is killed, stopped or hangs in C code can't say where it is. So each says it all the time: a thread writes
# the place of the thread that launched into the store of torch.distributed, every second. Who misses a rank reads what
# it said last, and whether it goes on saying something. Nobody waits for a sign, and nothing is decided by one, but
# for two facts that can't be mistaken: a process of this machine that is gone, and a rank that wrote that its program
# has ended, for which others might wait until their timeout.
# A backend that waits on an accelerator, as nccl does, raises nothing here: it ends the process when a collective is
# too late, and names nobody. Shortly before that the thread writes where all ranks are.
# The thread has a client of the store of its own: the main thread's may be in use. A world of many ranks speaks less
# often, so that the store takes so many signs a second at most.

RUNNING, ENDED, FAILED = "running", "ended", "failed"

ANSWER_SECONDS = 3.0  # an error about a lost rank waits for the store no longer than for the ranks

_SECONDS = 1.0
_SIGNS_A_SECOND = 256
_ENDS_KEY = "ends"
_KNOWN_KEY = "known"
# So long a wait for a rank that has ended its program must have lasted before it is broken off: what that rank has
# given before its end arrives sooner.
_PATIENCE_WITH_ENDED_SECONDS = 5.0
_PART_OF_LIMIT = 0.9  # of training's time limit: so long nothing has moved when the thread speaks up for the backend
_MAX_LISTED = 16  # ranks in what it writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank said of itself last.

    Attributes:
        beat: The how manieth sign it is, from 1: one that grows comes from a process that lives.
        at: When it was given, in seconds since 1970 by the clock of its machine.
        place: Where its main thread was.
        state: "running", "ended" (its program came to its end) or "failed" (by an error of its own).
        host: Name of its machine.
        process_id: Of its process there.
        machine: What only processes of one machine, which see each other, have in common.
        born: When that process began, as its machine counts.
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
    """Begins to give signs of the calling thread, until the world of now ends; does nothing where that is done already.

    Every rank calls it; no communication with other ranks.

    Raises:
        RankFailedError: The process that serves the store is gone, or did not answer in the time of set-up.
    """
    global _speaker
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if _speaker is None or not _speaker.is_speaking_of(_get_default_store()):
        _speaker = _Speaker(_get_default_store())
        _speaker.start()


def end_signs(state: str, text: str = "") -> None:
    """Gives the last sign of this rank's program.

    Args:
        state: "ended" or "failed".
        text: Why it failed.

    No communication with other ranks; nothing raises where the store is gone already.
    """
    global _speaker
    speaker, _speaker = _speaker, None
    if speaker is not None:
        speaker.end(state, text)


def read_signs(ranks: Iterable[int]) -> dict[int, Sign]:
    """Returns the last signs of these world ranks; who never gave one is not among them.

    Raises:
        RuntimeError: The process that serves the store has ended.
    """
    store = _signs_store(_get_default_store())
    return {rank: _sign_from(store.get(str(rank))) for rank in ranks if store.check([str(rank)])}


def ends_of_ranks() -> dict[int, tuple[str, str]]:
    """Returns of the world ranks whose program is over how ("ended" or "failed"), and why. Raises as `read_signs`."""
    return _ends(_signs_store(_get_default_store()))


def how_often(world_size: int) -> str:
    """Returns in words how often each rank of a world gives a sign."""
    seconds = _seconds_between(world_size)
    return "once a second" if seconds == 1 else f"every {seconds:.1f} s"


def _seconds_between(world_size: int) -> float:
    return _SECONDS * max(1.0, world_size / _SIGNS_A_SECOND)


def say_that_ends_are_known() -> set[int]:
    """Says that this rank has read how all others ended; returns which ranks have said so. Raises as `read_signs`."""
    store = _signs_store(_get_default_store())
    store.append(_KNOWN_KEY, f"{dist.get_rank()}\n")
    return ranks_that_know_ends()


def ranks_that_know_ends() -> set[int]:
    """Returns which ranks have said that they read how all others ended. Raises as `read_signs`."""
    return {int(line) for line in _signs_store(_get_default_store()).get(_KNOWN_KEY).split()}


def ended_processes(signs: Mapping[int, Sign]) -> list[int]:
    """Returns the ranks whose processes are known to have ended, as they ran on this machine and are gone."""
    return [rank for rank, sign in signs.items() if sign.machine == _machine() and _is_gone(sign)]


def place_as_json(place: CurrentPlace) -> dict[str, Any]:
    """Returns a place as JSON can hold it."""
    return asdict(place)


def place_from_json(fields: Mapping[str, Any]) -> CurrentPlace:
    """Returns what `place_as_json` was given."""
    place = {**fields, "phases": tuple(fields["phases"])}
    for name in ("operation", "last_operation"):
        if place[name] is not None:
            place[name] = OperationPlace(**{**place[name], "ranks": tuple(place[name]["ranks"])})
    return CurrentPlace(**place)


class _Speaker:
    """Gives signs of the thread that makes it, from a thread of its own; see Note [Signs]."""

    def __init__(self, default: Any) -> None:
        self._default = default  # torch's stubs leave out what a store can
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
        self._lock = threading.Lock()  # a sign is written by one thread at a time, the last one last
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="booster-signs", daemon=True)

    def start(self) -> None:
        """Begins."""
        join_at_exit(self._thread, self._stopping.set)
        self._thread.start()

    def is_speaking_of(self, default: Store) -> bool:
        """Returns whether it gives signs in this process, for the world of this store."""
        return self._default is default and self._process_id == os.getpid() and self._thread.is_alive()

    def end(self, state: str, text: str) -> None:
        """Gives the last sign."""
        if self._process_id != os.getpid():  # a forked child is no rank
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
            with self._lock, suppress(RuntimeError):  # the store is gone, or answers again later
                if not self._stopping.is_set():
                    self._say(RUNNING)
                    self._look(seconds)

    def _look(self, seconds: float) -> None:
        """Does what is due where the thread stands still."""
        place, ended = self._place(), set(_ends(self._store))
        before = self._stands.seconds
        self._stands.look(place, seconds, have_ended=bool(ended) and bool(place.phases))
        if self._stands.seconds_with_ended >= _PATIENCE_WITH_ENDED_SECONDS:
            self._stands.seconds_with_ended = 0.0
            from booster.comm.waiting import break_off  # it reads signs

            break_off(ended)
        limit = time_limits().training * _PART_OF_LIMIT
        if before < limit <= self._stands.seconds and "gloo" not in self._backend:
            sys.stderr.write(f"{self._standstill()}\n")

    def _standstill(self) -> str:
        """Returns what is known of all ranks before the backend ends this process."""
        signs = {rank: self._store.get(str(rank)) for rank in range(min(self._size, _MAX_LISTED))}
        lines = [f"  rank {rank}: {_sign_from(note).place}" for rank, note in signs.items()]
        more = [f"  and {self._size - _MAX_LISTED} more ranks"] if self._size > _MAX_LISTED else []
        head = (
            f"rank {self._rank}: nothing has moved for {self._stands.seconds:.0f} s, and {self._backend} ends a process"
            f" that waits for {time_limits().training:g} s in a collective. Where the ranks are by their last signs:"
        )
        return "\n".join((head, *lines, *more))

    def _is_of_now(self) -> bool:
        try:
            return dist.is_initialized() and _get_default_store() is self._default
        except (RuntimeError, ValueError):  # the world ended between the two questions
            return False

    def _place(self) -> CurrentPlace:
        return current_place(self._watched)

    def _say(self, state: str) -> None:
        self._beat += 1
        place = place_as_json(self._place())
        note = {"beat": self._beat, "at": time.time(), "state": state, "place": place, **self._who}
        self._store.set(str(self._rank), json.dumps(note))


class _Standing:
    """How long a thread has been at one place, and with ranks that have ended."""

    def __init__(self, place: CurrentPlace) -> None:
        self._mark = self._mark_of(place)
        self.seconds = 0.0
        self.seconds_with_ended = 0.0

    def look(self, place: CurrentPlace, seconds: float, *, have_ended: bool) -> None:
        """Takes note of where the thread is.

        Args:
            place: Where the thread is.
            seconds: Since the last look.
            have_ended: Whether some rank's program has ended.
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
    """Returns what is the same for processes that can see each other's numbers, and different elsewhere."""
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
