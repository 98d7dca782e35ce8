"""Barrier through the store that carries errors and small payloads; usable by a background thread."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store, _get_default_store

from booster.errors import DesyncError, RankFailedError, first_line, format_ranks
from booster.fault_tolerance.failure_diagnosis import describe_last_heartbeats, format_phase
from booster.fault_tolerance.heartbeat import ended_processes, exit_statuses, read_heartbeats
from booster.fault_tolerance.progress import current_progress
from booster.fault_tolerance.store import TimeoutStore, call_with_timeout
from booster.fault_tolerance.timeouts import timeouts

from .checks import error_class, serialize_error
from .collectives import global_rank_of, group_rank, group_size
from .shared_memory import flush_pending

# Note [Error barrier]
# Every phase has separate keys. Each rank writes `report/<rank>`: its error, if any, and its payload. Rank 0 waits for
# all reports and writes the `verdict`; the others wait for it. It is written by compare_set, so once: a rank whose wait
# times out writes one too, naming the ranks without a report. The first one applies to every rank, also to one that
# arrives later. So no rank continues where another timed out.
# A rank deletes its report once the verdict shows that rank 0 has read it; the last reader deletes the verdict. After a
# timeout the keys stay: a late rank must still find them. The verdict of a timeout is written early if the program or
# the process of a missing rank has ended.
# No rank blocks inside of the store: a blocking get holds the client's lock, and the main thread of this process may
# need it to build a group. For the same reason the barriers have a separate client (a clone), one per process.

_CHUNK_BYTES = 4 * 2**20  # TCPStore takes no value above 8 MiB
_MAX_TEXT = 4000
_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.02
_PAUSE_SHARE = 1 / 16  # of the time waited so far: what a rank waits too long
_ANSWER_SECONDS = 10.0  # timeout of a store call; a host may pause for a while
_ALIVE_CHECK_SECONDS = 1.0  # between checks of whether missing ranks are alive
_RANKS_AT_LAST_PAUSE = 64  # a larger world polls less often, so that its store serves as many requests a second

# By default store: the barriers' client of it, and the number of barriers of each name.
_clients: WeakKeyDictionary[Store, tuple[Any, Counter[str]]] = WeakKeyDictionary()
_clients_lock = threading.Lock()


class ErrorBarrier:
    """Barrier of a group's ranks at every phase of a task. A failure of one rank is raised on all of them.

    It uses the store of torch.distributed only, no collective, so it works beside collectives of other threads.

    Args:
        group: Process group, optional; defaults to the world, which is one rank without a launch.
        name: Name of the task, equal on all ranks. Barriers that exist at the same time have different names.
        timeout_seconds: Timeout of a phase, optional; defaults to the checkpoint timeout of the launch.

    Collective: every rank of the group makes it, and calls the same methods in the same order.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, name: str, timeout_seconds: float | None = None
    ) -> None:
        self._group = group
        self._rank, self._size = group_rank(group), group_size(group)
        self._timeout_seconds = timeouts().checkpoint if timeout_seconds is None else timeout_seconds
        self._name = name
        self._num_phases = 0
        self._store: TimeoutStore | None = None
        if self._size > 1:
            try:
                self._store = clone_store(group, name, min(self._timeout_seconds, _ANSWER_SECONDS))
            except dist.DistError as failure:
                raise self._store_error("the begin", failure) from failure

    def _store_error(self, phase: str, failure: dist.DistError) -> RankFailedError:
        return RankFailedError(
            f"rank {dist.get_rank()} lost the store of torch.distributed at {phase} of {self._name!r}"
            f"{format_phase(current_progress())}: {first_line(failure)}. The process that serves it (rank 0 or"
            " the launcher) has ended or is stopped, see its log"
        )

    def gather(self, phase: str, payload: bytes = b"", error: Exception | None = None) -> list[bytes]:
        """Wait for all ranks; return the payloads by rank on rank 0, and an empty list on the others.

        Args:
            phase: Name of the finished phase, for messages; equal on all ranks.
            payload: This rank's bytes.
            error: Error of this rank, optional.

        Raises:
            Exception: A rank passed an error: that error on this rank; elsewhere one of the same class of this library,
                or else `RankFailedError`, with the failing rank and its text.
            RankFailedError: A rank did not arrive in time, or the store is gone.
            DesyncError: The ranks are at different phases.

        Collective: every rank of the group must call it.
        """
        reports, _ = self._run_round(phase, payload, error, is_shared=False)
        return reports

    def share(self, phase: str, payload: bytes | None = None, error: Exception | None = None) -> bytes:
        """Wait for all ranks and return rank 0's payload. Raises as `gather` does.

        Args:
            phase: Name of the finished phase, for messages; equal on all ranks.
            payload: Rank 0's bytes; ignored on the others.
            error: Error of this rank, optional.

        Collective: every rank of the group must call it.
        """
        _, shared = self._run_round(phase, payload or b"", error, is_shared=True)
        return shared

    def _run_round(
        self, phase: str, payload: bytes, error: Exception | None, *, is_shared: bool
    ) -> tuple[list[bytes], bytes]:
        if self._store is None:
            if error is not None:
                raise error
            return [payload], payload
        flush_pending()
        self._num_phases += 1
        store = self._store.under(str(self._num_phases))
        round_ = BarrierRound(
            store,
            self._rank,
            self._size,
            f"{phase!r} of {self._name!r}",
            self._timeout_seconds,
            world_ranks=[global_rank_of(rank, self._group) for rank in range(self._size)],
        )
        try:
            return round_.run(payload, error, is_shared=is_shared)
        except dist.DistError as failure:
            if error is not None:
                raise error from failure
            raise self._store_error(repr(phase), failure) from failure


class BarrierRound:
    """One phase on one rank; see Note [Error barrier]."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        phase: str,
        timeout_seconds: float,
        *,
        world_ranks: Sequence[int] | None = None,
    ) -> None:
        self._store = store  # torch's stubs give its values as str; they are bytes
        self._rank, self._size = rank, size
        self._phase = phase
        self._world_ranks = world_ranks
        self._timeout_seconds = timeout_seconds
        self._reports = [f"report/{other}" for other in range(size)]

    def run(self, payload: bytes, error: Exception | None, *, is_shared: bool) -> tuple[list[bytes], bytes]:
        """Return the payloads of all ranks (on rank 0, unless shared) and the shared one."""
        own_key, own_payload = self._reports[self._rank], b"" if is_shared else payload
        head = {"phase": self._phase, "error": error and serialize_error(error, _MAX_TEXT)}
        value, num_own_chunks = self._with_chunks(own_key, head, own_payload)
        self._store.set(own_key, value)
        payloads: list[bytes] = []
        if self._rank == 0:
            if self._wait(self._reports, or_key="verdict"):
                heads, payloads = self._read(self._reports)
                failure = self._failure(heads)
                self._write_outcome(failure, payload if is_shared and failure is None else b"")
        else:
            self._wait(["verdict"])
        (outcome,), (shared,) = self._read(["verdict"])
        failure = outcome["error"]
        if failure is None or not failure["is_late"]:
            self._delete(own_key, num_own_chunks)
            if self._store.add("left", 1) == self._size:
                self._delete("verdict", outcome["num_chunks"])
                self._store.delete_key("left")
        if failure is not None:
            raise error if error is not None else error_class(failure["class"])(failure["text"])
        return [] if is_shared else payloads, shared

    def _wait(self, keys: Sequence[str], or_key: str | None = None) -> bool:
        """Return whether the keys appeared before `or_key`; write the verdict if they will not appear."""
        began = time.monotonic()
        deadline, next_check = began + self._timeout_seconds, began + _ALIVE_CHECK_SECONDS
        scale = max(1.0, self._size / _RANKS_AT_LAST_PAUSE)
        while not self._store.check(list(keys)):
            if or_key is not None and self._store.check([or_key]):
                return False
            now = time.monotonic()
            if now >= next_check:
                next_check = now + _ALIVE_CHECK_SECONDS
                ended = self._ended()
                if ended:
                    self._write_outcome(
                        self._timeout_error(ended, f"before their end, noticed after {now - began:.1f} s")
                    )
                    return False
            if now >= deadline:
                late = f"within {self._timeout_seconds:g} s"
                self._write_outcome(self._timeout_error(self._missing() or [0], late))
                return False
            pause = scale * min(max(_FIRST_PAUSE, _PAUSE_SHARE * (now - began)), _LAST_PAUSE)
            time.sleep(min(pause, deadline - now))
        return True

    def _missing(self) -> list[int]:
        return [rank for rank, key in enumerate(self._reports) if not self._store.check([key])]

    def _ended(self) -> list[int]:
        """Return the missing ranks whose program or process has ended; see Note [Heartbeats]."""
        if self._world_ranks is None:
            return []
        missing = {self._world_ranks[rank]: rank for rank in self._missing()}
        ended = {*exit_statuses(), *ended_processes(read_heartbeats(missing))}
        # A rank may have written its report and ended since.
        still_missing = set(self._missing())
        return [rank for world_rank, rank in missing.items() if world_rank in ended and rank in still_missing]

    def _timeout_error(self, missing: Sequence[int], when: str) -> dict[str, Any]:
        ranks = list(missing) if self._world_ranks is None else [self._world_ranks[rank] for rank in missing]
        known = "see the logs of the missing ranks; they died, hang, or need a longer timeout"
        if self._world_ranks is not None:
            known = f"{describe_last_heartbeats(ranks)}. See their logs; they died, hang, or need a longer timeout"
        text = (
            f"{format_ranks(ranks)} did not complete {self._phase} {when}, so all ranks stop"
            f"{format_phase(current_progress())}: {known}"
        )
        return {"class": RankFailedError.__name__, "text": text, "is_late": True}

    def _failure(self, heads: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        for rank, head in enumerate(heads):
            if head["phase"] != self._phase:
                text = (
                    f"rank {rank} is at {head['phase']} and rank 0 at {self._phase}: every rank must make the same"
                    " calls in the same order"
                )
                return {"class": DesyncError.__name__, "text": text, "is_late": False}
        failed = [(rank, head["error"]) for rank, head in enumerate(heads) if head["error"] is not None]
        if not failed:
            return None
        rank, (name, text) = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        text = f"rank {rank} failed{others} at {self._phase}, so all ranks stop: {text}"
        return {"class": name, "text": text, "is_late": False}

    def _write_outcome(self, failure: dict[str, Any] | None, payload: bytes = b"") -> None:
        value, _ = self._with_chunks("verdict", {"error": failure}, payload)
        self._store.compare_set("verdict", "", value)

    # Values of any size: a line of JSON and the first bytes under the key, the rest in chunks, which are written
    # before.

    def _with_chunks(self, key: str, head: dict[str, Any], payload: bytes) -> tuple[bytes, int]:
        """Write all chunks but the first; return the value of the key and the number of chunks."""
        num_chunks = max(1, -(-len(payload) // _CHUNK_BYTES))
        for number in range(1, num_chunks):
            self._store.set(f"{key}/{number}", payload[number * _CHUNK_BYTES : (number + 1) * _CHUNK_BYTES])
        line = json.dumps({**head, "num_chunks": num_chunks}).encode("ascii")
        return line + b"\n" + payload[:_CHUNK_BYTES], num_chunks

    def _read(self, keys: Sequence[str]) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Return heads and payloads of existing keys."""
        heads, payloads = [], []
        if self._store.has_extended_api():
            values = list(self._store.multi_get(list(keys)))
        else:
            values = [self._store.get(key) for key in keys]
        for key, value in zip(keys, values, strict=True):
            line, _, first = value.partition(b"\n")
            heads.append(json.loads(line))
            rest = [f"{key}/{number}" for number in range(1, heads[-1]["num_chunks"])]
            payloads.append(b"".join((first, *(self._store.get(chunk) for chunk in rest))))
        return heads, payloads

    def _delete(self, key: str, num_chunks: int) -> None:
        for number in range(1, num_chunks):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)


def clone_store(group: dist.ProcessGroup | None, name: str, answer_seconds: float = _ANSWER_SECONDS) -> TimeoutStore:
    """Return a store under a prefix unused by these ranks so far, by a client that only this module uses."""
    default: Any = _get_default_store()
    ranks = dist.get_process_group_ranks(group)
    key = f"{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}/{name}"
    with _clients_lock:
        if default not in _clients:
            _clients[default] = (call_with_timeout(default.clone, answer_seconds), Counter())
        client, uses = _clients[default]
        uses[key] += 1
        return TimeoutStore(client, f"booster.barrier/{key}/{uses[key]}", answer_seconds)


class RankStore:
    """One value per rank of the world, in the store of torch.distributed. Usable by a background thread.

    Args:
        name: Name of the values. Instances that exist at the same time have different names.

    Every rank makes it, in the same order. No communication with other ranks, and no waiting for one.
    """

    def __init__(self, name: str) -> None:
        self._num_ranks = group_size()
        self._store: Any = clone_store(None, name) if self._num_ranks > 1 else HashStore()
        self._rank = dist.get_rank() if self._num_ranks > 1 else 0

    def set(self, value: str) -> None:
        """Set this rank's value. Raises RuntimeError if the process that serves the store has ended."""
        self._store.set(str(self._rank), value)

    def delete(self) -> None:
        """Delete this rank's value. Raises as `set`."""
        self._store.delete_key(str(self._rank))

    def get_all(self) -> dict[int, str]:
        """Return the existing values by global rank. Raises as `set`."""
        keys = [str(rank) for rank in range(self._num_ranks)]
        return {int(key): bytes(self._store.get(key)).decode() for key in keys if self._store.check([key])}
