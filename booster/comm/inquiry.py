"""Who is missing where a communication failed, and where all ranks are: found out through the store, told in words."""

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
_SECONDS_BETWEEN_SIGNS = 2.5  # in this time a process that lives has given another one
_MAX_LISTED = 10  # ranks in a message
_MAX_NOTES = 3  # in a message
_NOTES_KEY = "notes"
_LEFT_KEY = "left"
_VERDICT_SECONDS = 0.25  # between two looks at which processes live


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


class Inquiry:
    """Finds out who is missing; see Note [Missing ranks].

    Args:
        place: Which operation failed.
        group: Its ranks.
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
        """Returns in words where this rank stands. No communication."""
        return f"{self._place}{surroundings(self._where)}"

    def report(self) -> None:
        """Tells the others where this rank stands."""
        note = {**asdict(self._place), "where": place_as_json(self._where)}
        self._store.set(_report_key(self._rank), json.dumps(note))

    def finding(self, seconds: float, ended: Sequence[int] = ()) -> str:
        """Returns a sentence about the missing ranks, who are the same for all that are there.

        Args:
            seconds: How long to wait for those that are not.
            ended: World ranks of which it is known; none: time has to show.
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
            return f"the others had given this rank up before it came; {self._whereabouts()}"
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
        """Returns whether none of these ranks can come any more."""
        over = {*ends_of_ranks(), *ended_processes(read_signs(silent))}
        return bool(silent) and over.issuperset(silent)

    def _silent(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([_report_key(rank)])]

    def _known_of(self, missing: Sequence[int]) -> list[_Known]:
        has_had_time = time.monotonic() - self._began >= _SECONDS_BETWEEN_SIGNS
        return _known_of(missing, self._first_signs if has_had_time else {})

    def _whereabouts(self) -> str:
        """Returns where each rank stands that has written it."""
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
    """Returns what is known of world ranks that are missing from what this thread waits in, in words.

    Raises:
        RuntimeError: The process that serves the store has ended.
    """
    known = _known_of(ranks, {})
    return f"{_text_of(known)}{_hint_in(known, [])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is known of a missing rank: in words, and as what explains it; None: its place explains nothing."""

    text: str
    other: Other | None = None


def _known_of(ranks: Sequence[int], before: Mapping[int, Sign]) -> list[_Known]:
    """Returns what is known of world ranks.

    Args:
        ranks: Which.
        before: Their signs of some seconds ago; who has given none since has stopped. Empty: that can't be told.
    """
    chosen = ranks[:_MAX_LISTED]
    signs, ends = read_signs(chosen), ends_of_ranks()
    gone = set(ended_processes(signs))
    known = [_known_of_one(rank, signs[rank], ends, gone, before) for rank in chosen if rank in signs]
    if len(known) < len(chosen):
        known.append(_Known(text="see the log there, whether it ended, hangs or is busy elsewhere"))
    return known


def _text_of(known: Sequence[_Known]) -> str:
    return "; ".join(one.text for one in known)


def _hint_in(known: Sequence[_Known], waiting: Sequence[Other]) -> str:
    """Returns what is usually wrong, with what joins it to the text before; nothing where the cause is another one."""
    explaining = [one.other for one in known if one.other is not None]
    if len(explaining) < len(known) or noted_failures():
        return ""
    usual = hint(current_place(), [*explaining, *waiting])
    return f". {usual}" if usual else ""


def _first_reason(left: Sequence[tuple[int, str]]) -> str:
    """Returns why a rank has left that followed others; what failed by itself is in the notes."""
    reasons = [reason for _, reason in left if reason]
    return reasons[0] if reasons and not noted_failures() else "see the log there"


def _known_of_one(
    rank: int, sign: Sign, ends: Mapping[int, tuple[str, str]], gone: Iterable[int], before: Mapping[int, Sign]
) -> _Known:
    age = max(0.0, time.time() - sign.at)  # by two machines' clocks, which agree in such clusters to much less
    often = f"signs come {how_often(dist.get_world_size())}"
    last = f"last sign, {age:.1f} s ago ({often}, so it may have gone on since), said: {sign.place}"
    if rank in ends:
        state, text = ends[rank]
        after = f"after {sign.place.num_steps} steps"
        if state == ENDED:
            other = Other(place=sign.place, state="ended")
            return _Known(text=f"rank {rank}'s program ended {after}, while others go on", other=other)
        return _Known(text=f"rank {rank}'s program failed {after}: {text}")
    if rank in gone:
        process = f"rank {rank}'s process {sign.process_id} on host {sign.host}"
        return _Known(text=f"{process} has ended without a word (was it killed?); its {last}")
    if rank not in before:
        return _Known(text=f"on host {sign.host}, rank {rank}'s {last}")
    if sign.beat > before[rank].beat:
        alive = f"rank {rank}'s process lives and is {sign.place}: it is busy, hangs, or makes other calls"
        return _Known(text=alive, other=Other(place=sign.place, state="busy"))
    since = f"and none has come since: it is stopped, or host {sign.host} is lost"
    return _Known(text=f"rank {rank}'s last sign, {age:.1f} s ago ({often}), said: {sign.place}; {since}")


def surroundings(where: CurrentPlace) -> str:
    """Returns phases and step in parentheses; nothing where a program has not begun with any."""
    phases = [name for name in where.phases if name != "communication"]
    if not phases and not where.num_steps:
        return ""
    inside = " ".join(f"in {name}" for name in reversed(phases)) or "outside of all phases"
    return f" ({inside}, after {where.num_steps} steps)"


def noted_failures() -> list[str]:
    """Returns what ranks of the world have noted, the first failure first, as others may follow from it."""
    notes = _entries(_notes_store(), _NOTES_KEY)[:_MAX_NOTES]
    return [f"rank {rank} had failed: {text}" for rank, text in notes]


def write_note(text: str) -> None:
    """Writes why this rank failed, for all to read."""
    _append(_notes_store(), _NOTES_KEY, [dist.get_rank(), text])


def write_that_left(group: dist.ProcessGroup, reason: str) -> None:
    """Writes that this rank has left the group, and why, for who waits for it there."""
    _append(_group_store(group), _LEFT_KEY, [dist.get_rank(), reason])


def listed(ranks: Sequence[int]) -> str:
    """Returns the ranks in words."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_MAX_LISTED])) + _and_more(ranks)


def _group_store(group: dist.ProcessGroup) -> BoundedStore:
    return BoundedStore(_get_default_store(), f"booster.failure/{group.group_name}", ANSWER_SECONDS)


def _notes_store() -> BoundedStore:
    return BoundedStore(_get_default_store(), "booster.failures", ANSWER_SECONDS)


def _append(store: BoundedStore, key: str, entry: object) -> None:
    store.append(key, json.dumps(entry) + "\n")


def _entries(store: BoundedStore, key: str) -> list[Any]:
    """Returns what was appended, in this order."""
    return [json.loads(line) for line in store.get(key).splitlines()] if store.check([key]) else []


def _report_key(rank: int) -> str:
    return f"at/{rank}"


def _and_more(several: Sequence[object]) -> str:
    return f" and {len(several) - _MAX_LISTED} more" if len(several) > _MAX_LISTED else ""
