"""Which of the ranks that failed was the cause, and how to say it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Failure", "RankFailure", "exit_code_of", "has_cause", "report"]

# What ranks report when it was another one that failed.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "RankFailedError",
    "DistNetworkError",
    "DistStoreError",
)


class Failure(Protocol):
    """What is used of torch's ProcessFailure: where, how, and what the rank wrote before it ended, if anything."""

    local_rank: int
    pid: int
    exitcode: int
    error_file_data: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class RankFailure:
    """A rank that failed on another host, as the launcher there told it."""

    host: str
    local_rank: int
    pid: int
    exitcode: int
    error_file_data: dict[str, Any]


def has_cause(failures: Mapping[int, Failure]) -> bool:
    """Returns whether a rank is among them that failed for a reason of its own, not only for another's failure."""
    return any(not any(_order(failure)[:2]) for failure in failures.values())


def exit_code_of(failures: Mapping[int, Failure]) -> int:
    """Returns the exit code of the rank that was the cause, 128 + n where signal n killed it."""
    code = failures[_cause(failures)].exitcode
    return code if code >= 0 else 128 - code


def report(failures: Mapping[int, Failure], world_size: int) -> str:
    """Returns a line for every failed rank and last the cause, with its traceback where it left one."""
    cause = _cause(failures)
    others = [f"booster run: {_line(rank, failures[rank], world_size)}" for rank in sorted(failures) if rank != cause]
    first = f"booster run: {_line(cause, failures[cause], world_size)}"
    stack = _extra(failures[cause]).get("py_callstack", "").rstrip()
    return "\n".join([*others, f"{first}, first of all:\n{stack}" if stack else first])


def _cause(failures: Mapping[int, Failure]) -> int:
    return min(failures, key=lambda rank: (*_order(failures[rank]), rank))


def _order(failure: Failure) -> tuple[bool, bool, float]:
    extra = _extra(failure)
    # One that left no word was killed, or ended by os._exit: there is no time, so any word of another cause is first.
    written = extra.get("time_ns", float("inf"))
    stack = extra.get("py_callstack", "")
    last_line = stack.rstrip().rpartition("\n")[2]
    ended_by_launcher = failure.exitcode == -signal.SIGTERM and not extra
    return ended_by_launcher, any(text in last_line for text in _CONSEQUENCES), written


def _extra(failure: Failure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return extra if isinstance(extra, dict) else {}


def _line(rank: int, failure: Failure, world_size: int) -> str:
    on_host = f" on {failure.host}" if isinstance(failure, RankFailure) else ""
    who = f"rank {rank} of {world_size}{on_host} (local rank {failure.local_rank}, pid {failure.pid})"
    if failure.exitcode >= 0:
        return f"{who} failed with exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGTERM:
        return f"{who} was ended by SIGTERM"
    name = signal.Signals(-failure.exitcode).name
    hint = ", as the system does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
    return f"{who} was killed by {name}{hint}"
