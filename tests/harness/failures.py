"""What went wrong on which rank, in the order in which a reader wants it: the cause first, its echoes after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

# What a rank says whose peer is gone: true, but not the news.
_ECHO = re.compile(
    "Connection (closed|reset) by peer|Broken pipe|Socket closed|failed to pass monitoredBarrier|"
    "Connection was likely closed|connectFullMesh failed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """One rank's part in a failed job.

    Attributes:
        rank: the rank.
        kind: it raised; it asked to skip the test; its process ended; it was still running when the job was given up.
        summary: such as `ValueError: boom`; as many lines as the exception's message has.
        detail: the traceback, or the stacks of a process that was killed.
        error_type: the exception's full name, such as `booster.errors.ConfigError`; empty where nothing was raised.
        at: when it happened, in seconds of the monotonic clock that all processes of the machine share.
    """

    rank: int
    kind: Literal["raised", "skipped", "died", "hung"]
    summary: str
    detail: str
    error_type: str = ""
    at: float = 0.0

    @property
    def is_echo(self) -> bool:
        """Whether this is only the consequence of another rank's failure."""
        return self.kind == "hung" or (self.kind == "raised" and _ECHO.search(self.summary) is not None)

    def headline(self) -> str:
        """Returns the failure in one line, without the rank."""
        words = {"raised": "raised ", "skipped": "skipped: ", "died": "died: ", "hung": "was still running, "}
        return words[self.kind] + self.summary.partition("\n")[0]


class RanksFailed(AssertionError):
    """A job failed on at least one rank.

    Attributes:
        failures: the failed ranks, the first real error first.
        results: what the other ranks returned, by rank.
        world_size: number of ranks of the job.
    """

    def __init__(self, failures: Sequence[RankFailure], results: dict[int, Any], world_size: int, limit: str) -> None:
        self.failures = sorted(failures, key=lambda failure: (failure.is_echo, failure.at))
        self.results = results
        self.world_size = world_size
        super().__init__(_report(self.failures, results, world_size, limit))

    @property
    def first(self) -> RankFailure:
        """The failure that the others follow from."""
        return self.failures[0]


def _report(failures: Sequence[RankFailure], results: dict[int, Any], world_size: int, limit: str) -> str:
    first = failures[0]
    if first.kind == "hung":
        places = "; ".join(f"rank {failure.rank} {failure.summary}" for failure in sorted(failures, key=_rank))
        lines = [f"timed out after {limit} s on {len(failures)} of {world_size} ranks: {places}"]
    else:
        lines = [f"rank {first.rank} of {world_size} {first.headline()}"]
    for failure in failures:
        lines += ["", f"--- rank {failure.rank} {failure.headline()}", failure.detail.rstrip()]
    lines += ["", *(f"--- rank {rank} returned {_short(result)}" for rank, result in sorted(results.items()))]
    return "\n".join(lines).rstrip()


def _rank(failure: RankFailure) -> int:
    return failure.rank


def _short(result: Any, limit: int = 200) -> str:
    text = " ".join(repr(result).split())
    return text if len(text) <= limit else text[:limit] + "..."
