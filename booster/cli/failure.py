"""Root cause among failed ranks, and the failure report."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "Failure",
    "RankFailure",
    "exit_code_of",
    "has_error_report",
    "has_root_cause",
    "no_restart_line",
    "report",
    "report_time",
    "restart_line",
]

# Note [Root cause]
# A failed rank makes others fail, and torch's launcher terminates the rest. The root cause is the first rank with an
# error of its own in its report; else one without a report, killed by a signal or left by os._exit; else the first
# whose error is a failed peer, which it names. Last come ranks with exit code 1 and no report, such as one whose script
# ended early and that exited after its peers failed (Note [Shutdown] in booster/farewell.py), and those that the
# launcher itself terminated.
_OWN_ERROR, _CONSEQUENCE, _EXITED_AFTER_PEERS, _TERMINATED = range(4)

# Errors of ranks whose peer failed.
_PEER_ERRORS = (
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
    """Used fields of torch's ProcessFailure; `error_file_data` is the error report written by the rank, if any."""

    local_rank: int
    pid: int
    exitcode: int
    error_file_data: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class RankFailure:
    """A failed rank, as seen by its launcher.

    Attributes:
        host: Host name; "" for a single machine.
        local_rank: Local rank on that host.
        pid: Process ID on that host.
        exitcode: Exit code; -n if killed by signal n.
        error_file_data: Error report written by the rank, if any.
        by_launcher: Whether the launcher terminated it after another failure; None if unknown.
        was_stopped: Whether it was stopped at that time, as by SIGSTOP.
    """

    host: str
    local_rank: int
    pid: int
    exitcode: int
    error_file_data: dict[str, Any]
    by_launcher: bool | None = None
    was_stopped: bool = False


def has_root_cause(failures: Mapping[int, Failure]) -> bool:
    """Return whether any of the failures is not the consequence of another."""
    return min(_consequence_rank(failure) for failure in failures.values()) in (_OWN_ERROR, _EXITED_AFTER_PEERS)


def exit_code_of(failures: Mapping[int, Failure]) -> int:
    """Return the exit code of the root cause, 128 + n if killed by signal n."""
    code = failures[_root_cause(failures)].exitcode
    return code if code >= 0 else 128 - code


def has_error_report(failures: Mapping[int, Failure]) -> bool:
    """Return whether the root cause left an error report."""
    return bool(_extra(failures[_root_cause(failures)]))


def report_time(failure: Failure) -> float:
    """Return the time of a rank's error report in nanoseconds since 1970, infinite if it left none."""
    # Without a report it was killed or ended by os._exit: the time is unknown, so reports of other causes come first.
    return float(_extra(failure).get("time_ns", float("inf")))


def restart_line(failures: Mapping[int, Failure], world_size: int, number: int, max_restarts: int) -> str:
    """Return the log line of restart `number` of at most `max_nodes`."""
    cause = _root_cause(failures)
    name = _line(cause, failures[cause], world_size)
    return f"booster run: {name}; restarting all ranks, restart {number} of {max_restarts}"


def no_restart_line(max_restarts: int) -> str:
    """Return the log line of a failure after the last restart."""
    return f"booster run: all restarts of --max-restarts {max_restarts} are used, so the run ends"


def report(failures: Mapping[int, Failure], world_size: int) -> str:
    """Return a line for every failed rank, the root cause last, with its traceback if it left one."""
    cause = _root_cause(failures)
    others = [f"booster run: {_line(rank, failures[rank], world_size)}" for rank in sorted(failures) if rank != cause]
    first = f"booster run: {_line(cause, failures[cause], world_size)}"
    stack = _extra(failures[cause]).get("py_callstack", "").rstrip()
    return "\n".join([*others, f"{first}, first of all:\n{stack}" if stack else first])


def _root_cause(failures: Mapping[int, Failure]) -> int:
    return min(failures, key=lambda rank: (_consequence_rank(failures[rank]), report_time(failures[rank]), rank))


def _consequence_rank(failure: Failure) -> int:
    """Return the distance of a failure from being the root cause, see Note [Root cause]."""
    extra = _extra(failure)
    by_launcher = failure.by_launcher if isinstance(failure, RankFailure) else None
    if by_launcher is None:
        by_launcher = failure.exitcode == -signal.SIGTERM and not extra
    if by_launcher:
        return _TERMINATED
    if not extra:
        return _EXITED_AFTER_PEERS if failure.exitcode == 1 else _OWN_ERROR
    last_line = extra.get("py_callstack", "").rstrip().rpartition("\n")[2]
    return _CONSEQUENCE if any(text in last_line for text in _PEER_ERRORS) else _OWN_ERROR


def _extra(failure: Failure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return extra if isinstance(extra, dict) else {}


def _line(rank: int, failure: Failure, world_size: int) -> str:
    on_host = f" on {failure.host}" if isinstance(failure, RankFailure) and failure.host else ""
    name = f"rank {rank} of {world_size}{on_host} (local rank {failure.local_rank}, pid {failure.pid})"
    by_launcher, was_stopped = None, False
    if isinstance(failure, RankFailure):
        by_launcher, was_stopped = failure.by_launcher, failure.was_stopped
    if by_launcher:
        return (
            f"{name} {'was stopped, and ' if was_stopped else ''}was terminated by the launcher"
            f"{_detail(failure.exitcode)}"
        )
    if failure.exitcode >= 0:
        return f"{name} failed with exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGTERM:
        # A rank with an error report may have received the launcher's signal while it exited.
        is_foreign = by_launcher is False and not _extra(failure)
        return f"{name} was terminated by SIGTERM{', which the launcher did not send' if is_foreign else ''}"
    hint = ", as the system does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
    return f"{name} was killed by {_signal_name(failure.exitcode)}{hint}"


def _detail(exitcode: int) -> str:
    """Return how a rank exited that the launcher terminated, if not by SIGTERM."""
    if exitcode >= 0:
        return f", with exit code {exitcode}"
    return "" if exitcode == -signal.SIGTERM else f" ({_signal_name(exitcode)})"


def _signal_name(exitcode: int) -> str:
    return signal.Signals(-exitcode).name
