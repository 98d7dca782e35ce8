"""Who is missing: what all ranks say of where they are, put into words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from booster.comm.signs import progress_from_json, progress_to_json
from booster.phases import CollectiveInfo, Progress

__all__ = ["Whereabouts", "from_note", "report", "to_note"]

_MAX_RANKS = 16  # in a report


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What a rank says of itself when nothing moves.

    Attributes:
        step: The last step that it ended.
        idle_seconds: How long ago.
        place: Where it is.
        line: The line of the user's code that it runs.
        num_collectives: How many torch's backend has begun in the world on this rank, some not by this library; None:
            the backend doesn't count.
        has_left: It has come out of the Monitor's block.
    """

    step: int
    idle_seconds: float
    place: Progress
    line: str = ""
    num_collectives: int | None = None
    has_left: bool = False

    def __str__(self) -> str:
        if self.has_left:
            return f"has left the Monitor's block after step {self.step}"
        at = f"; at {self.line}" if self.line else ""
        return f"has ended step {self.step}, and is {self.place.describe()}{at}"


def to_note(whereabouts: Whereabouts) -> str:
    """Returns it as a text that `from_note` reads."""
    return json.dumps({**asdict(whereabouts), "place": progress_to_json(whereabouts.place)})


def from_note(note: str) -> Whereabouts:
    """Returns what `to_note` was given."""
    fields = json.loads(note)
    return Whereabouts(**{**fields, "place": progress_from_json(fields["place"])})


def report(everyone: Mapping[int, Whereabouts], num_ranks: int) -> str:
    """Returns who is missing from what others wait for, and where every rank is.

    Args:
        everyone: By world rank; who gave no sign is not among them.
        num_ranks: Of the world.
    """
    waiting: dict[tuple[object, ...], list[int]] = {}
    for rank, one in sorted(everyone.items()):
        operation = one.place.operation
        if operation is not None:  # the ends of a message are for themselves
            waiting.setdefault((operation, None if operation.peer is None else rank), []).append(rank)
    lines = [_missing_in(ranks, everyone) for ranks in list(waiting.values())[:_MAX_RANKS]]
    if not lines and _is_behind(everyone):
        lines.append(_behind(everyone))
    elif not lines:
        lines.append("no rank is in a communication that this library knows of")
    for other in sorted(range(num_ranks), key=lambda one: (one in everyone, one))[:_MAX_RANKS]:
        lines.append(f"rank {other} " + (str(everyone[other]) if other in everyone else "gave no sign: see its log"))
    if num_ranks > _MAX_RANKS:
        lines.append(f"and {num_ranks - _MAX_RANKS} more ranks")
    return "\n".join(f"  {line}" for line in lines)


def _missing_in(waiting: Sequence[int], everyone: Mapping[int, Whereabouts]) -> str:
    """Returns who has not come to the operation that these ranks are in."""
    rank, operation = waiting[0], everyone[waiting[0]].place.operation
    assert operation is not None
    ranks = operation.ranks if operation.peer is None else (operation.peer,)
    missing = [other for other in ranks if other != rank and not _has_come(operation, rank, everyone.get(other))]
    head = f"{_listed(waiting)} {'wait' if len(waiting) > 1 else 'waits'} in {operation}"
    return f"{head}; missing there: {_listed(missing)}" if missing else f"{head}; all ranks of it are there"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_RANKS])) + (" and more" if len(ranks) > _MAX_RANKS else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}"


def _has_come(operation: CollectiveInfo, rank: int, other: Whereabouts | None) -> bool:
    """Returns whether another rank is in the same operation, or was."""
    if other is None:
        return False
    name = {"send": "receive", "receive": "send"}.get(operation.name, operation.name)
    peer = None if operation.peer is None else rank
    there = [one for one in (other.place.operation, other.place.last_operation) if one is not None]
    same = [one for one in there if (one.name, one.ranks, one.peer) == (name, operation.ranks, peer)]
    return any(one.number >= operation.number for one in same)


# Note [Collectives of torch]
# Some are not started by booster.comm: those of FSDP2, and what a user calls. A rank may hang in one
# without having entered any operation of ours. But the backend counts on each rank those that it began, in the same
# order on all of them: who has begun fewer is who the others wait for.


def _is_behind(everyone: Mapping[int, Whereabouts]) -> bool:
    return len(set(_counts(everyone).values())) > 1


def _behind(everyone: Mapping[int, Whereabouts]) -> str:
    counts = _counts(everyone)
    most = max(counts.values())
    behind = [rank for rank, count in counts.items() if count < most]
    listed = ", ".join(f"rank {rank} ({counts[rank]})" for rank in behind[:_MAX_RANKS])
    return f"torch's backend has begun {most} collectives of the world on some ranks; missing there: {listed}"


def _counts(everyone: Mapping[int, Whereabouts]) -> dict[int, int]:
    return {rank: one.num_collectives for rank, one in everyone.items() if one.num_collectives is not None}
