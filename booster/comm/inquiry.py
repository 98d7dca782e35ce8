"""Failure diagnosis: the ranks missing from a failed collective, and the progress of the others, via the store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from booster.comm.bounded_store import BoundedStore
from booster.comm.hints import CALLS, Other, hint
from booster.comm.signs import (
    ANSWER_SECONDS,
    ENDED,
    Sign,
    ended_processes,
    ends_of_ranks,
    how_often,
    place_as_json,
    place_from_json,
    read_signs,
)
from booster.phases import CurrentPlace, current_place

__all__ = [
    "Inquiry",
    "Place",
    "last_signs_of",
    "listed",
    "noted_failures",
    "surroundings",
    "write_note",
    "write_that_left",
]

_PAUSE_SECONDS = 0.02
_SECONDS_BETWEEN_SIGNS = 2.5  # a live process writes another heartbeat in this time
_MAX_LISTED = 10  # ranks in a message
_MAX_NOTES = 3  # in a message
_NOTES_KEY = "notes"
_LEFT_KEY = "left"
_VERDICT_SECONDS = 0.25  # between two checks of which processes are alive


@dataclass(frozen=True, slots=True)
class Place:
    """Identifier of a collective: operation name, per-group sequence number, and global rank of a message's peer."""

    operation: str
    number: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.operation} number {self.number}"
        if self.peer is None:
            return text
        return f"{text} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"


class Inquiry:
    """Diagnosis of one failed collective; see Note [Missing ranks].

    Args:
        place: Failed operation.
        group: Process group of the operation.
    """

    def __init__(self, place: Place, group: dist.ProcessGroup) -> None:
        self._store = _group_store(group)
        self._place, self._rank = place, dist.get_rank()
        self._where = current_place()
        pair = None if place.peer is None else sorted((self._rank, place.peer))
        self._ranks = dist.get_process_group_ranks(group) if pair is None else pair
        self._verdict_key = "missing" if pair is None else f"missing/{pair[0]}-{pair[1]}"
        self._began = time.monotonic()
        self._first_signs: dict[int, Sign] = {}

    def where(self) -> str:
        """Return the operation and this rank's progress as text. No communication."""
        return f"{self._place}{surroundings(self._where)}"

    def report(self) -> None:
        """Write this rank's operation and progress into the store."""
        note = {**asdict(self._place), "where": place_as_json(self._where)}
        self._store.set(_report_key(self._rank), json.dumps(note))

    def finding(self, seconds: float, ended: Sequence[int] = ()) -> str:
        """Return a sentence about the missing ranks. All reporting ranks agree on which ones are missing.

        Args:
            seconds: Time to wait for reports of other ranks.
            ended: Global ranks that are known to have ended; if there are any, nothing is waited for.
        """
        if not ended:
            self._first_signs = read_signs(self._silent())
            self._wait_for_reports(seconds)
        return "".join(f"{note}; " for note in noted_failures()) + self._verdict(ended)

    def _verdict(self, ended: Sequence[int]) -> str:
        left = _entries(self._store, _LEFT_KEY)
        if left and not self._store.check([self._verdict_key]):
            ranks = sorted({rank for rank, _ in left})
            return f"{listed(ranks)} left the group after a failure: {_first_reason(left)}"
        self._store.compare_set(self._verdict_key, "", json.dumps(list(ended) or self._silent()))
        missing: list[int] = json.loads(self._store.get(self._verdict_key))
        if self._rank in missing:
            return f"the other ranks had counted this rank as missing before it reported; {self._whereabouts()}"
        if missing:
            are = "is" if len(missing) == 1 else "are"
            known = self._known_of(missing)
            waiting = [Other(place=where, state="waits") for _, where in self._others()]
            text = f"{listed(missing)} {are} missing: {_text_of(known)}; {self._whereabouts()}"
            return f"{text}{_hint_in(known, waiting)}"
        waiting = [Other(place=where, state="waits") for _, where in self._others()]
        usual = hint(self._where, waiting)
        text = f"no rank is missing; {self._whereabouts()}: all must make the same calls in the same order"
        return f"{text}. {usual}" if usual not in ("", CALLS) else text

    def _wait_for_reports(self, seconds: float) -> None:
        keys = [_report_key(rank) for rank in self._ranks]
        deadline = time.monotonic() + seconds
        next_look = time.monotonic()
        while time.monotonic() < deadline:
            if self._store.check(keys) or any(self._store.check([key]) for key in (self._verdict_key, _LEFT_KEY)):
                return
            if time.monotonic() >= next_look:
                if self._all_over(self._silent()):
                    return
                next_look = time.monotonic() + _VERDICT_SECONDS
            time.sleep(_PAUSE_SECONDS)

    def _all_over(self, silent: Sequence[int]) -> bool:
        """Return whether the processes or programs of all of these ranks have ended."""
        over = {*ends_of_ranks(), *ended_processes(read_signs(silent))}
        return bool(silent) and over.issuperset(silent)

    def _silent(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([_report_key(rank)])]

    def _known_of(self, missing: Sequence[int]) -> list[_Known]:
        has_had_time = time.monotonic() - self._began >= _SECONDS_BETWEEN_SIGNS
        return _known_of(missing, self._first_signs if has_had_time else {})

    def _whereabouts(self) -> str:
        """Return the operation and progress of each rank that reported, as text."""
        reports = self._reports()
        known = [f"rank {rank} is at {place}{surroundings(where)}" for rank, (place, where) in reports.items()]
        return ", ".join(known[:_MAX_LISTED]) + _and_more(known)

    def _others(self) -> list[tuple[Place, CurrentPlace]]:
        return [report for rank, report in self._reports().items() if rank != self._rank]

    def _reports(self) -> dict[int, tuple[Place, CurrentPlace]]:
        silent = self._silent()
        reports = {}
        for rank in [one for one in self._ranks if one not in silent]:
            note = json.loads(self._store.get(_report_key(rank)))
            reports[rank] = Place(note["operation"], note["number"], note["peer"]), place_from_json(note["where"])
        return reports


def last_signs_of(ranks: Sequence[int]) -> str:
    """Return the last known state of missing global ranks as text, with a likely cause.

    Raises:
        RuntimeError: The process that serves the store has ended.
    """
    known = _known_of(ranks, {})
    return f"{_text_of(known)}{_hint_in(known, [])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """State of a missing rank as text, and as input of `hint` where its progress may explain the failure."""

    text: str
    other: Other | None = None


def _known_of(ranks: Sequence[int], before: Mapping[int, Sign]) -> list[_Known]:
    """Return the states of global ranks.

    Args:
        ranks: Global ranks.
        before: Their heartbeats of some seconds ago. A rank without a new one since has stopped.
    """
    chosen = ranks[:_MAX_LISTED]
    signs, ends = read_signs(chosen), ends_of_ranks()
    gone = set(ended_processes(signs))
    known = [_known_of_one(rank, signs[rank], ends, gone, before) for rank in chosen if rank in signs]
    if len(known) < len(chosen):
        known.append(_Known(text="see the log there, whether it ended, hangs or runs something else"))
    return known


def _text_of(known: Sequence[_Known]) -> str:
    return "; ".join(one.text for one in known)


def _hint_in(known: Sequence[_Known], waiting: Sequence[Other]) -> str:
    """Return the likely cause as a further sentence, or "" where the cause is known to be another one."""
    explaining = [one.other for one in known if one.other is not None]
    if len(explaining) < len(known) or noted_failures():
        return ""
    usual = hint(current_place(), [*explaining, *waiting])
    return f". {usual}" if usual else ""


def _first_reason(left: Sequence[tuple[int, str]]) -> str:
    """Return the reason of a rank that left because of another one's failure; first failures are reported elsewhere."""
    reasons = [reason for _, reason in left if reason]
    return reasons[0] if reasons and not noted_failures() else "see the log there"


def _known_of_one(
    rank: int, sign: Sign, ends: Mapping[int, tuple[str, str]], gone: Iterable[int], before: Mapping[int, Sign]
) -> _Known:
    age = max(0.0, time.time() - sign.at)  # by two hosts' clocks, whose difference in a cluster is much smaller
    often = f"heartbeats come {how_often(dist.get_world_size())}"
    last = f"last heartbeat, {age:.1f} s ago ({often}, so it may have continued since), reported: {sign.place}"
    if rank in ends:
        state, text = ends[rank]
        after = f"after {sign.place.num_steps} steps"
        if state == ENDED:
            other = Other(place=sign.place, state="ended")
            return _Known(text=f"rank {rank}'s program ended {after}, while others continue", other=other)
        return _Known(text=f"rank {rank}'s program failed {after}: {text}")
    if rank in gone:
        process = f"rank {rank}'s process {sign.process_id} on host {sign.host}"
        return _Known(text=f"{process} has ended without a report (was it killed?); its {last}")
    if rank not in before:
        return _Known(text=f"on host {sign.host}, rank {rank}'s {last}")
    if sign.beat > before[rank].beat:
        alive = f"rank {rank}'s process is alive, {sign.place}: it is busy, hangs, or makes other calls"
        return _Known(text=alive, other=Other(place=sign.place, state="busy"))
    since = f"none has come since: it is stopped, or host {sign.host} is lost"
    return _Known(text=f"rank {rank}'s last heartbeat, {age:.1f} s ago ({often}), reported: {sign.place}; {since}")


def surroundings(where: CurrentPlace) -> str:
    """Return phases and step in parentheses, or "" before the first phase and step."""
    phases = [name for name in where.phases if name != "communication"]
    if not phases and not where.num_steps:
        return ""
    inside = " ".join(f"in {name}" for name in reversed(phases)) or "outside of all phases"
    return f" ({inside}, after {where.num_steps} steps)"


def noted_failures() -> list[str]:
    """Return the failures that ranks reported, the first one first: others may follow from it."""
    notes = _entries(_notes_store(), _NOTES_KEY)[:_MAX_NOTES]
    return [f"rank {rank} had failed: {text}" for rank, text in notes]


def write_note(text: str) -> None:
    """Report the reason of this rank's failure to all ranks."""
    _append(_notes_store(), _NOTES_KEY, [dist.get_rank(), text])


def write_that_left(group: dist.ProcessGroup, reason: str) -> None:
    """Report to the group that this rank has aborted it, and the reason."""
    _append(_group_store(group), _LEFT_KEY, [dist.get_rank(), reason])


def listed(ranks: Sequence[int]) -> str:
    """Return the ranks as text."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_MAX_LISTED])) + _and_more(ranks)


def _group_store(group: dist.ProcessGroup) -> BoundedStore:
    return BoundedStore(_get_default_store(), f"booster.failure/{group.group_name}", ANSWER_SECONDS)


def _notes_store() -> BoundedStore:
    return BoundedStore(_get_default_store(), "booster.failures", ANSWER_SECONDS)


def _append(store: BoundedStore, key: str, entry: object) -> None:
    store.append(key, json.dumps(entry) + "\n")


def _entries(store: BoundedStore, key: str) -> list[Any]:
    return [json.loads(line) for line in store.get(key).splitlines()] if store.check([key]) else []


def _report_key(rank: int) -> str:
    return f"at/{rank}"


def _and_more(several: Sequence[object]) -> str:
    return f" and {len(several) - _MAX_LISTED} more" if len(several) > _MAX_LISTED else ""
