"""An error about a lost connection becomes one that names the ranks that are missing, and where the others are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_default_store

from booster.comm.shared_memory import abort_shared_memory
from booster.errors import RankFailedError
from booster.kernels.shared_memory import SharedMemoryError

__all__ = ["REPORT_SECONDS", "Place", "failures_named", "hang_up", "note_failure"]

# Note [Missing ranks]
# A connection that breaks doesn't tell whose fault it was: one rank waits in vain for another, gives up, and thereby
# breaks its connections to all others. And in a ring only the neighbours of a dead rank see it at all. So each rank
# that fails writes into the store, which isn't part of the group, where it stands; closes its own connections of the
# group and ends its shared memory, which wakes those who wait for it; and waits until the others have written, too. Who
# writes nothing in REPORT_SECONDS is missing: it has ended, it hangs, or it is busy elsewhere. The first that has
# counted writes the verdict (by compare_set, so once) and all obey it, also a rank that was late and finds its
# connections closed: it reads that it was given up. Of a message between two ranks the verdict is about those two.
# Where shared memory has shown that a rank's process has ended there is nothing to wait for: that one is missing.
# The keys belong to the group and stay: gloo never mends a group, and what is called on it later fails the same way.
# Nobody waits inside of the store: see Note [Error barrier].
# A rank that fails for a reason of its own can spare the others the wait: `note_failure` writes the reason, `hang_up`
# writes that it has left the groups, and closes its connections. Notes belong to the world and outlive a failure that
# the program survives, so a note alone does not end an inquiry; that a rank has left the group does.
# With TORCH_DISTRIBUTED_DEBUG=DETAIL a barrier of torch's own goes ahead of each collective, over connections that stay
# open: there a rank that waits in it may count as missing.

REPORT_SECONDS = 3.0
_PAUSE_SECONDS = 0.02
_NEVER_SENT = 2**24 - 1  # a tag
_AT_ONCE = timedelta(milliseconds=1)
_MAX_NOTE = 400  # characters of what a rank says about its failure
_MAX_TEXT = 300
_MAX_LISTED = 10  # ranks in a message
_MAX_NOTES = 3  # in a message
_NOTES_KEY = "notes"
_LEFT_KEY = "left"

# What gloo, nccl, torch's debug mode and our shared memory write when a rank is lost or late. Other errors are about
# the call itself.
_LOST = re.compile(
    r"timed? ?out|connection|closed|reset by peer|broken pipe|socket|monitoredBarrier|remote (process|error)|abort",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: in which operation, the how manieth of its kind, and with which world rank (None: all)."""

    operation: str
    number: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.operation} number {self.number}"
        if self.peer is None:
            return text
        return f"{text} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"


@contextmanager
def failures_named(place: Place, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turns an error about a lost or late rank into `RankFailedError`; every blocking wait goes through it.

    Raises:
        RankFailedError: With the operation, the ranks that are missing and the error of torch or of shared memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise RankFailedError(_explanation(place, group or _get_default_group(), error)) from error


def _explanation(place: Place, group: dist.ProcessGroup, error: RuntimeError) -> str:
    witness = "shared memory" if isinstance(error, SharedMemoryError) else "torch"
    head, tail = f"rank {dist.get_rank()} could not finish {place}", f"{witness} says: {_first_line(error)}"
    try:
        finding = _Inquiry(place, group).finding(_known_to_have_ended(error, group))
    except dist.DistError as failure:
        return (
            f"{head}, and the store of torch.distributed is gone too ({_first_line(failure)}): the process that serves"
            f" it (rank 0 or torchrun) has ended, see its log; {tail}"
        )
    return f"{head}: {finding}" if _noted_failures() else f"{head}: {finding}; {tail}"


def _known_to_have_ended(error: RuntimeError, group: dist.ProcessGroup) -> list[int]:
    if not isinstance(error, SharedMemoryError) or error.ended_rank is None:
        return []
    return [dist.get_global_rank(group, error.ended_rank)]


class _Inquiry:
    """Finds out who is missing; see Note [Missing ranks]."""

    def __init__(self, place: Place, group: dist.ProcessGroup) -> None:
        self._store = _group_store(group)
        self._place, self._rank, self._group = place, dist.get_rank(), group
        pair = None if place.peer is None else sorted((self._rank, place.peer))
        self._ranks = dist.get_process_group_ranks(group) if pair is None else pair
        self._verdict_key = "missing" if pair is None else f"missing/{pair[0]}-{pair[1]}"

    def finding(self, ended: Sequence[int] = ()) -> str:
        """Returns a sentence about the missing ranks, who are the same for all that are there.

        Args:
            ended: World ranks of which it is known; none: time has to show.
        """
        self._store.set(_report_key(self._rank), json.dumps(asdict(self._place)))
        _close_connections(self._group)
        if not ended:
            self._wait_for_reports()
        return "".join(f"{note}; " for note in _noted_failures()) + self._verdict(ended)

    def _verdict(self, ended: Sequence[int]) -> str:
        left = _entries(self._store, _LEFT_KEY)
        if left:
            return f"{_listed(sorted(set(left)))} left the group after a failure: see the log there"
        self._store.compare_set(self._verdict_key, "", json.dumps(list(ended) or self._silent()))
        missing: list[int] = json.loads(self._store.get(self._verdict_key))
        if self._rank in missing:
            return f"the others had given this rank up before it came; {self._whereabouts()}"
        if missing:
            return f"{_listed(missing)} gave no sign: see the log there, whether it ended, hangs or is busy elsewhere"
        return (
            f"no rank is missing; {self._whereabouts()}: all must make the same calls in the same order. The usual"
            " cause is another number of batches or steps on some rank"
        )

    def _wait_for_reports(self) -> None:
        keys = [_report_key(rank) for rank in self._ranks]
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline:
            if self._store.check(keys) or any(self._store.check([key]) for key in (self._verdict_key, _LEFT_KEY)):
                return
            time.sleep(_PAUSE_SECONDS)

    def _silent(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([_report_key(rank)])]

    def _whereabouts(self) -> str:
        """Returns where each rank stands that has written it."""
        silent = self._silent()
        present = [rank for rank in self._ranks if rank not in silent]
        places = [Place(**json.loads(self._store.get(_report_key(rank)))) for rank in present[:_MAX_LISTED]]
        listed = ", ".join(f"rank {rank} is at {place}" for rank, place in zip(present, places, strict=False))
        return listed + _and_more(present)


def note_failure(text: str) -> None:
    """Tells the other ranks why this one failed: their errors about lost ranks will say so.

    To be called before `hang_up`, for a failure of this rank's own, not for a `RankFailedError`. No communication: it
    writes into the store of the world. Where that is gone, or there is no world, nothing happens.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):  # the process that serves the store has ended
            _append(_notes_store(), _NOTES_KEY, [dist.get_rank(), shorten(text, _MAX_NOTE, placeholder=" ...")])


def hang_up(groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Ends what this rank shares in these groups, for good: who waits for it there, or will, fails at once.

    With gloo and through shared memory; ranks that wait by NCCL find it by its own timeout. Returns at once; nothing
    raises where the connections or the store are gone already. No other thread may start an operation there meanwhile.

    Args:
        groups: None: the world. Those that this rank is not in are left out.
    """
    chosen = [group or _get_default_group() for group in groups]
    mine = [group for group in chosen if dist.get_rank(group) >= 0]
    for group in mine:
        with suppress(RuntimeError):  # the process that serves the store has ended
            _append(_group_store(group), _LEFT_KEY, dist.get_rank())
    for group in mine:
        _close_connections(group)


def _close_connections(group: dist.ProcessGroup) -> None:
    """Ends this rank's shared memory, and closes its connections of a gloo group.

    Gloo closes them itself where a message does not come in time.
    """
    abort_shared_memory(group)
    if "gloo" not in str(dist.get_backend(group)):
        return
    for other in dist.get_process_group_ranks(group):
        if other != dist.get_rank():
            with suppress(RuntimeError):  # the timeout that is wanted, or a connection that is closed already
                work = dist.irecv(torch.empty(1), src=other, group=group, tag=_NEVER_SENT)
                if work is not None:
                    work.wait(_AT_ONCE)


def _noted_failures() -> list[str]:
    """Returns what ranks of the world have noted, the first failure first, as others may follow from it."""
    notes = _entries(_notes_store(), _NOTES_KEY)[:_MAX_NOTES]
    return [f"rank {rank} had failed: {text}" for rank, text in notes]


# torch's stubs give a store's values as str; they are bytes.
def _group_store(group: dist.ProcessGroup) -> Any:
    return PrefixStore(f"booster.failure/{group.group_name}", _get_default_store())


def _notes_store() -> Any:
    return PrefixStore("booster.failures", _get_default_store())


def _append(store: Any, key: str, entry: object) -> None:
    store.append(key, json.dumps(entry) + "\n")


def _entries(store: Any, key: str) -> list[Any]:
    """Returns what was appended, in this order."""
    return [json.loads(line) for line in store.get(key).splitlines()] if store.check([key]) else []


def _report_key(rank: int) -> str:
    return f"at/{rank}"


def _listed(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_MAX_LISTED])) + _and_more(ranks)


def _and_more(ranks: Sequence[int]) -> str:
    return f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:_MAX_TEXT] if str(error).strip() else type(error).__name__
