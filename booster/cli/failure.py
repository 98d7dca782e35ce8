"""Which of the ranks that failed was the cause, and how to say it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "Failure",
    "RankFailure",
    "exit_code_of",
    "has_cause",
    "has_left_word",
    "last_start_line",
    "report",
    "restart_line",
    "time_of_word",
]

# Note [Which rank was the cause]
# A rank that failed makes others fail, and torch's launcher ends those that don't. The cause is the first that said a
# reason of its own; else one that could not, as a signal killed it or it left by os._exit; else the first whose reason
# is another rank: it names that one. Last come ranks that failed with exit code 1 and said nothing, as one whose
# program came to its end too early and that followed the others (Note [Farewell] in booster/farewell.py), and those
# that the launcher itself ended.
_OWN, _CONSEQUENCE, _FOLLOWED, _ENDED = range(4)

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
    """A rank that failed, as its launcher knows it.

    Attributes:
        host: Its machine, "" where there is one only.
        local_rank: Its number there.
        pid: Its process there.
        exitcode: How it ended, -n by signal n.
        error_file_data: What it wrote before.
        by_launcher: Whether the launcher ended it, after another had failed; None: unknown.
        was_stopped: Whether it was stopped then, as by SIGSTOP.
    """

    host: str
    local_rank: int
    pid: int
    exitcode: int
    error_file_data: dict[str, Any]
    by_launcher: bool | None = None
    was_stopped: bool = False


def has_cause(failures: Mapping[int, Failure]) -> bool:
    """Returns whether a rank is among them that failed for a reason of its own, not only for another's failure."""
    return min(_kind(failure) for failure in failures.values()) in (_OWN, _FOLLOWED)


def exit_code_of(failures: Mapping[int, Failure]) -> int:
    """Returns the exit code of the rank that was the cause, 128 + n where signal n killed it."""
    code = failures[_cause(failures)].exitcode
    return code if code >= 0 else 128 - code


def has_left_word(failures: Mapping[int, Failure]) -> bool:
    """Returns whether the rank that was the cause said why it failed."""
    return bool(_extra(failures[_cause(failures)]))


def time_of_word(failure: Failure) -> float:
    """Returns when a rank said why it fails, in nanoseconds since 1970; infinite: it did not."""
    # One that left no word was killed, or ended by os._exit: there is no time, so any word of another cause is first.
    return float(_extra(failure).get("time_ns", float("inf")))


def restart_line(failures: Mapping[int, Failure], world_size: int, number: int, most: int) -> str:
    """Returns what is said as all ranks start anew for the how manieth time, of so many at most."""
    cause = _cause(failures)
    who = _line(cause, failures[cause], world_size)
    return f"booster run: {who}; all ranks start anew, restart {number} of {most}"


def last_start_line(most: int) -> str:
    """Returns what is said where ranks have failed and don't start anew, after so many restarts."""
    return f"booster run: no restart is left of --max-restarts {most}, so the run ends"


def report(failures: Mapping[int, Failure], world_size: int) -> str:
    """Returns a line for every failed rank and last the cause, with its traceback where it left one."""
    cause = _cause(failures)
    others = [f"booster run: {_line(rank, failures[rank], world_size)}" for rank in sorted(failures) if rank != cause]
    first = f"booster run: {_line(cause, failures[cause], world_size)}"
    stack = _extra(failures[cause]).get("py_callstack", "").rstrip()
    return "\n".join([*others, f"{first}, first of all:\n{stack}" if stack else first])


def _cause(failures: Mapping[int, Failure]) -> int:
    return min(failures, key=lambda rank: (_kind(failures[rank]), time_of_word(failures[rank]), rank))


def _kind(failure: Failure) -> int:
    """Returns how far a rank's failure is from being the cause, see Note [Which rank was the cause]."""
    extra = _extra(failure)
    by_launcher = failure.by_launcher if isinstance(failure, RankFailure) else None
    if by_launcher is None:
        by_launcher = failure.exitcode == -signal.SIGTERM and not extra
    if by_launcher:
        return _ENDED
    if not extra:
        return _FOLLOWED if failure.exitcode == 1 else _OWN
    last_line = extra.get("py_callstack", "").rstrip().rpartition("\n")[2]
    return _CONSEQUENCE if any(text in last_line for text in _CONSEQUENCES) else _OWN


def _extra(failure: Failure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return extra if isinstance(extra, dict) else {}


def _line(rank: int, failure: Failure, world_size: int) -> str:
    on_host = f" on {failure.host}" if isinstance(failure, RankFailure) and failure.host else ""
    who = f"rank {rank} of {world_size}{on_host} (local rank {failure.local_rank}, pid {failure.pid})"
    by_launcher, was_stopped = None, False
    if isinstance(failure, RankFailure):
        by_launcher, was_stopped = failure.by_launcher, failure.was_stopped
    if by_launcher:
        return f"{who} {'was stopped, and ' if was_stopped else ''}was ended by the launcher{_detail(failure.exitcode)}"
    if failure.exitcode >= 0:
        return f"{who} failed with exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGTERM:
        # One that has said why it fails may have got the launcher's on its way out.
        is_foreign = by_launcher is False and not _extra(failure)
        return f"{who} was ended by SIGTERM{', which the launcher did not send' if is_foreign else ''}"
    hint = ", as the system does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
    return f"{who} was killed by {_signal_name(failure.exitcode)}{hint}"


def _detail(exitcode: int) -> str:
    """Returns how a rank ended that the launcher told to end, where it was not simply so."""
    if exitcode >= 0:
        return f", with exit code {exitcode}"
    return "" if exitcode == -signal.SIGTERM else f" ({_signal_name(exitcode)})"


def _signal_name(exitcode: int) -> str:
    return signal.Signals(-exitcode).name
