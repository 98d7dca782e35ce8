"""Likely cause of a wait that failed, chosen from the progress of the ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from booster.phases import SAVE_PHASES, Progress

__all__ = ["CALLS", "JOIN", "SAVES", "SAVES_OR_BATCHES", "TRAINING", "PeerStatus", "likely_cause"]

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
        place: Progress of the rank.
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
