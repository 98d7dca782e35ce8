"""Failure diagnosis: the ranks missing from a failed collective, and the progress of the others, via the store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from booster.errors import format_list, format_ranks

from .heartbeat import (
    ANSWER_SECONDS,
    ENDED,
    Heartbeat,
    ended_processes,
    exit_statuses,
    heartbeat_interval,
    heartbeat_interval_text,
    progress_from_json,
    read_heartbeats,
)
from .progress import SAVE_PHASES, Progress, current_progress
from .store import TimeoutStore

_BATCHES = "`for batch in booster.join_uneven(batches)` ends the loop of all ranks together"

SAVES = "Saving and loading are collective: call them on every rank, without `if rank == 0`"
SAVES_OR_BATCHES = f"{SAVES}. If a rank reached it because its batches ended first, {_BATCHES}"
TRAINING = (
    f"The usual cause is another number of batches or steps on some rank: {_BATCHES}. A call on one rank alone has the"
    " same effect: a forward, a `clip_grad_norm_` or a `state_dict()` that others don't make, or a skipped `step`"
)
JOIN = (
    "`for batch in booster.join_uneven(batches)` must be around the loop on every rank, and no rank may leave the loop"
    " before it ends"
)
CALLS = (
    "All ranks must make the same calls in the same order: look for a call that one rank makes alone, as under `if rank"
    " == 0`, or leaves out"
)

_OF_SAVES = frozenset(("save", *SAVE_PHASES, "load"))
_OF_TRAINING = frozenset(("backward", "clip", "forward", "pipeline", "step"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """State of another rank.

    Attributes:
        progress: Progress of the rank.
        state: "waits" (for others, too), "busy" (alive, and has not reported a wait), or "ended" (the program
            finished).
    """

    progress: Progress
    state: Literal["waits", "busy", "ended"]


def likely_cause(waiting: Progress, others: Sequence[PeerStatus]) -> str:
    """Return the likely cause, in sentences without the last period, or "".

    Args:
        waiting: Progress of this rank, which waits.
        others: States of the ranks that may explain it, without those that were killed, stopped or failed.
    """
    own = _activity(waiting)
    is_complete = all(other.state == "waits" for other in others)
    kinds = {_peer_activity(other) for other in others if is_complete or _explains_wait(other, own)}
    all_kinds = {own, *kinds}
    if not kinds or (own == "boost" and "save" not in all_kinds):
        return ""
    if "save" in all_kinds:
        if len(all_kinds) == 1:
            return ""
        return SAVES_OR_BATCHES if all_kinds & {"training", "join"} else SAVES
    if "boost" in all_kinds:
        return ""
    if "join" in all_kinds and len(all_kinds) > 1:
        return JOIN
    return TRAINING if "training" in all_kinds else CALLS


def _explains_wait(other: PeerStatus, own: str) -> bool:
    """Return whether a rank's state explains the wait, where some ranks are missing."""
    kind = _peer_activity(other)
    if other.state == "ended":
        return True
    # A rank that is busy in the same phase, with its data or with the user's own code may still arrive. In a save all
    # ranks take part at the same time.
    is_elsewhere = kind != own and kind != "data"
    return is_elsewhere and (other.state == "waits" or kind != "outside" or own == "save")


def _peer_activity(other: PeerStatus) -> str:
    return "outside" if other.state == "ended" else _activity(other.progress)


def _activity(progress: Progress) -> str:
    phases = set(progress.phases)
    if phases & _OF_SAVES:
        return "save"
    if "boost" in phases:
        return "boost"
    if "data" in phases:  # where `join_uneven` alone communicates
        return "data" if progress.operation is None else "join"
    if phases & _OF_TRAINING:
        return "training"
    return "evaluate" if "evaluate" in phases else "outside"


_PAUSE_SECONDS = 0.02
_HEARTBEAT_INTERVALS = 2.5  # a live process writes another heartbeat in this time
_MAX_LISTED = 10  # ranks in a message
_MAX_FAILURES = 3  # in a message
_MAX_REASON = 400  # characters of a rank's report of its failure
_FAILURES_KEY = "failures"
_LEFT_KEY = "left"
_names: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
_ALIVE_CHECK_SECONDS = 0.25  # between two checks of which processes are alive


@dataclass(frozen=True, slots=True)
class CollectiveId:
    """Identifier of a collective: operation name, per-group sequence number, and global rank of a message's peer."""

    operation: str
    number: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.operation} number {self.number}"
        if self.peer is None:
            return text
        return f"{text} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"


class FailureDiagnosis:
    """Diagnosis of one failed collective; see Note [Missing ranks].

    Args:
        collective: Failed operation.
        group: Process group of the operation.

    Attributes:
        position: Operation and progress of this rank as text.
    """

    def __init__(self, collective: CollectiveId, group: dist.ProcessGroup) -> None:
        self._store = _group_store(group)
        self._collective, self._rank = collective, dist.get_rank()
        self._progress = current_progress()
        self.position = f"{collective}{format_phase(self._progress)}"
        pair = None if collective.peer is None else sorted((self._rank, collective.peer))
        self._ranks = dist.get_process_group_ranks(group) if pair is None else pair
        self._missing_key = "missing" if pair is None else f"missing/{pair[0]}-{pair[1]}"
        self._next_heartbeat = time.monotonic() + _HEARTBEAT_INTERVALS * heartbeat_interval(dist.get_world_size())
        self._first_heartbeats: dict[int, Heartbeat] = {}

    def diagnose(self, seconds: float, ended: Sequence[int] = ()) -> str:
        """Write this rank's operation and progress into the store, and return a sentence about the missing ranks.

        All reporting ranks agree on which ones are missing.

        Args:
            seconds: Time to wait for reports of other ranks.
            ended: Global ranks that are known to have ended; if there are any, nothing is waited for.
        """
        report = {"collective": str(self._collective), "progress": asdict(self._progress)}
        self._store.set(f"at/{self._rank}", json.dumps(report))
        if not ended:
            self._first_heartbeats = read_heartbeats(self._unreported())
            self._wait_for_reports(seconds)
        return "".join(f"{report}; " for report in reported_failures()) + self._agree_on_missing(ended)

    def _agree_on_missing(self, ended: Sequence[int]) -> str:
        left = _entries(self._store, _LEFT_KEY)
        if left and not self._store.check([self._missing_key]):
            ranks = sorted({rank for rank, _ in left})
            # The reason of a rank that left because of another one's failure; first failures are reported elsewhere.
            reasons = [reason for _, reason in left if reason]
            reason = reasons[0] if reasons and not reported_failures() else "see the log there"
            return f"{format_ranks(ranks)} left the group after a failure: {reason}"
        self._store.compare_set(self._missing_key, "", json.dumps(list(ended) or self._unreported()))
        missing: list[int] = json.loads(self._store.get(self._missing_key))
        if self._rank in missing:
            return f"the other ranks had counted this rank as missing before it reported; {self._format_positions()}"
        others = [progress for rank, (_, progress) in self._reports().items() if rank != self._rank]
        waiting = [PeerStatus(progress=progress, state="waits") for progress in others]
        if missing:
            are = "is" if len(missing) == 1 else "are"
            known = _explain_ranks(missing, self._first_heartbeats if time.monotonic() >= self._next_heartbeat else {})
            states = "; ".join(text for text, _ in known)
            text = f"{format_ranks(missing)} {are} missing: {states}; {self._format_positions()}"
            return f"{text}{_likely_cause(known, waiting)}"
        usual = likely_cause(self._progress, waiting)
        text = f"no rank is missing; {self._format_positions()}: all must make the same calls in the same order"
        return f"{text}. {usual}" if usual not in ("", CALLS) else text

    def _wait_for_reports(self, seconds: float) -> None:
        keys = [f"at/{rank}" for rank in self._ranks]
        deadline = time.monotonic() + seconds
        next_look = time.monotonic()
        while time.monotonic() < deadline:
            if self._store.check(keys) or any(self._store.check([key]) for key in (self._missing_key, _LEFT_KEY)):
                return
            if time.monotonic() >= next_look:
                unreported = self._unreported()
                ended = {*exit_statuses(), *ended_processes(read_heartbeats(unreported))}
                if unreported and ended.issuperset(unreported):
                    return
                next_look = time.monotonic() + _ALIVE_CHECK_SECONDS
            time.sleep(_PAUSE_SECONDS)

    def _unreported(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"at/{rank}"])]

    def _format_positions(self) -> str:
        """Return the operation and progress of each rank that reported, as text."""
        reports = self._reports().items()
        known = (f"rank {rank} is at {text}{format_phase(progress)}" for rank, (text, progress) in reports)
        return format_list(known, _MAX_LISTED)

    def _reports(self) -> dict[int, tuple[str, Progress]]:
        """Return operation and progress of the ranks that have reported."""
        unreported = self._unreported()
        reported = [rank for rank in self._ranks if rank not in unreported]
        reports = {rank: json.loads(self._store.get(f"at/{rank}")) for rank in reported}
        return {rank: (one["collective"], progress_from_json(one["progress"])) for rank, one in reports.items()}


def describe_last_heartbeats(ranks: Sequence[int]) -> str:
    """Return the last known state of missing global ranks, with a likely cause. Raises as `read_heartbeats`."""
    known = _explain_ranks(ranks, {})
    return f"{'; '.join(text for text, _ in known)}{_likely_cause(known, [])}"


# State of a missing rank as text, and as input of `likely_cause` where its progress may explain the failure.
_Explanation: TypeAlias = tuple[str, PeerStatus | None]


def _explain_ranks(ranks: Sequence[int], first_heartbeats: Mapping[int, Heartbeat]) -> list[_Explanation]:
    """Return the states of global ranks.

    Args:
        ranks: Global ranks.
        first_heartbeats: Their heartbeats of some seconds ago. A rank without a new one since has stopped.
    """
    chosen = ranks[:_MAX_LISTED]
    heartbeats, exits = read_heartbeats(chosen), exit_statuses()
    ended = set(ended_processes(heartbeats))
    explanations = [
        _explain_rank(rank, heartbeats[rank], exits, ended, first_heartbeats) for rank in chosen if rank in heartbeats
    ]
    if len(explanations) < len(chosen):
        explanations.append(("see the log there, whether it ended, hangs or runs something else", None))
    return explanations


def _likely_cause(explanations: Sequence[_Explanation], waiting: Sequence[PeerStatus]) -> str:
    """Return the likely cause as a further sentence, or "" where the cause is known to be another one."""
    peers = [peer for _, peer in explanations if peer is not None]
    if len(peers) < len(explanations) or reported_failures():
        return ""
    cause = likely_cause(current_progress(), [*peers, *waiting])
    return f". {cause}" if cause else ""


def _explain_rank(
    rank: int,
    heartbeat: Heartbeat,
    exits: Mapping[int, tuple[str, str]],
    ended: Iterable[int],
    first_heartbeats: Mapping[int, Heartbeat],
) -> _Explanation:
    age = max(0.0, time.time() - heartbeat.time)  # by two hosts' clocks, whose difference in a cluster is much smaller
    interval = f"heartbeats come {heartbeat_interval_text(dist.get_world_size())}"
    last = (
        f"last heartbeat, {age:.1f} s ago ({interval}, so it may have continued since), reported: {heartbeat.progress}"
    )
    if rank in exits:
        state, text = exits[rank]
        after = f"after {heartbeat.progress.num_steps} steps"
        if state == ENDED:
            other = PeerStatus(progress=heartbeat.progress, state="ended")
            return f"rank {rank}'s program ended {after}, while others continue", other
        return f"rank {rank}'s program failed {after}: {text}", None
    if rank in ended:
        process = f"rank {rank}'s process {heartbeat.process_id} on host {heartbeat.host}"
        return f"{process} has ended without a report (was it killed?); its {last}", None
    if rank not in first_heartbeats:
        return f"on host {heartbeat.host}, rank {rank}'s {last}", None
    if heartbeat.sequence > first_heartbeats[rank].sequence:
        alive = f"rank {rank}'s process is alive, {heartbeat.progress}: it is busy, hangs, or makes other calls"
        return alive, PeerStatus(progress=heartbeat.progress, state="busy")
    since = f"none has come since: it is stopped or killed, or host {heartbeat.host} is lost"
    return f"rank {rank}'s last heartbeat, {age:.1f} s ago ({interval}), reported: {heartbeat.progress}; {since}", None


def format_phase(progress: Progress) -> str:
    """Return phases and step in parentheses, or "" before the first phase and step."""
    phases = [name for name in progress.phases if name != "communication"]
    if not phases and not progress.num_steps:
        return ""
    inside = " ".join(f"in {name}" for name in reversed(phases)) or "outside of all phases"
    return f" ({inside}, after {progress.num_steps} steps)"


def reported_failures() -> list[str]:
    """Return the failures that ranks reported, the first one first: others may follow from it."""
    failures = _entries(_store("booster.failures"), _FAILURES_KEY)[:_MAX_FAILURES]
    return [f"rank {rank} had failed: {text}" for rank, text in failures]


def report_failure(text: str) -> None:
    """Report this rank's failure: the other ranks' errors about lost ranks will include it.

    Called before `abort_groups`, for a local failure, not for a `RankFailedError`. No communication: it writes into the
    store. If that is gone, or there is no process group, nothing happens.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):  # the process that serves the store has ended
            _append(_store("booster.failures"), _FAILURES_KEY, text)


def report_group_abort(group: dist.ProcessGroup, reason: str) -> None:
    """Report to the group that this rank has aborted it, and the reason."""
    with suppress(RuntimeError):  # the process that serves the store has ended
        _append(_group_store(group), _LEFT_KEY, reason)


def _append(store: TimeoutStore, key: str, text: str) -> None:
    store.append(key, json.dumps([dist.get_rank(), shorten(text, _MAX_REASON, placeholder=" ...")]) + "\n")


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Set the name that reports about a group have in the store, where torch's name may differ between its ranks."""
    _names[group] = name


def _group_store(group: dist.ProcessGroup) -> TimeoutStore:
    return _store(f"booster.failure/{_names.get(group, group.group_name)}")


def _store(prefix: str) -> TimeoutStore:
    return TimeoutStore(_get_default_store(), prefix, ANSWER_SECONDS)


def _entries(store: TimeoutStore, key: str) -> list[Any]:
    return [json.loads(line) for line in store.get(key).splitlines()] if store.check([key]) else []
