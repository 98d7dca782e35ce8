"""Exit report and exit code of a multi-node run: pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

# Note [Root cause]
# A failed rank makes others fail, and torch's launcher terminates the rest. The root cause is the first rank with an
# error of its own in its report; else one without a report, killed by a signal or left by os._exit; else the first
# whose error is a failed peer, which it names. Last come ranks with exit code 1 and no report, such as one whose script
# ended early and that exited after its peers failed (Note [Shutdown] in booster/fault_tolerance/shutdown.py), and those
# that the launcher itself terminated.
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


@dataclass(slots=True, kw_only=True)
class RankFailure:
    """A failed rank, as seen by its launcher.

    Attributes:
        host: Host name; "" for a single machine.
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


def has_root_cause(failures: Mapping[int, RankFailure]) -> bool:
    """Return whether any of the failures is not the consequence of another."""
    return min(_consequence_rank(failure) for failure in failures.values()) in (_OWN_ERROR, _EXITED_AFTER_PEERS)


def exit_code_of(failures: Mapping[int, RankFailure]) -> int:
    """Return the exit code of the root cause, 128 + n if killed by signal n."""
    code = failures[_root_cause(failures)].exitcode
    return code if code >= 0 else 128 - code


def has_error_report(failures: Mapping[int, RankFailure]) -> bool:
    """Return whether the root cause left an error report."""
    return bool(error_info(failures[_root_cause(failures)]))


def report_time(failure: RankFailure) -> float:
    """Return the time of a rank's error report in nanoseconds since 1970, infinite if it left none."""
    # Without a report it was killed or ended by os._exit: the time is unknown, so reports of other causes come first.
    return float(error_info(failure).get("time_ns", float("inf")))


def restart_line(failures: Mapping[int, RankFailure], world_size: int, number: int, max_restarts: int) -> str:
    """Return the log line of restart `number` of at most `max_restarts`."""
    cause = _root_cause(failures)
    name = _line(cause, failures[cause], world_size)
    return f"booster run: {name}; restarting all ranks, restart {number} of {max_restarts}"


def report(failures: Mapping[int, RankFailure], world_size: int) -> str:
    """Return a line for every failed rank, the root cause last, with its traceback if it left one."""
    cause = _root_cause(failures)
    others = [f"booster run: {_line(rank, failures[rank], world_size)}" for rank in sorted(failures) if rank != cause]
    first = f"booster run: {_line(cause, failures[cause], world_size)}"
    stack = without_own_frames(error_info(failures[cause]).get("py_callstack", "").rstrip())
    return "\n".join([*others, f"{first}, first of all:\n{stack}" if stack else first])


def without_own_frames(traceback: str) -> str:
    """Return a traceback without the frames of this library, except the last; the rank's output has all of them."""
    blocks: list[list[str]] = []  # a frame, or a line of another kind
    for line in traceback.splitlines():
        if blocks and _is_frame(blocks[-1]) and line.startswith("    "):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    packages = [find_spec(f"booster.{name}") for name in ("checkpoint_io", "kernels", "plugins")]
    folders = [folder for one in packages if one is not None for folder in one.submodule_search_locations or ()]
    folders.append(str(Path(__file__).parents[2]))
    kept = [
        block
        for block, after in pairwise([*blocks, [""]])
        if not (_is_frame(block) and _is_own(block[0], folders) and _is_frame(after))
    ]
    return "\n".join(line for block in kept for line in block)


def _is_frame(block: Sequence[str]) -> bool:
    return block[0].startswith('  File "')


def _is_own(frame: str, folders: Sequence[str]) -> bool:
    path = frame.split('"')[1]
    return Path(path).name == "contextlib.py" or any(path.startswith(f"{folder}/") for folder in folders)


def _root_cause(failures: Mapping[int, RankFailure]) -> int:
    return min(failures, key=lambda rank: (_consequence_rank(failures[rank]), report_time(failures[rank]), rank))


def _consequence_rank(failure: RankFailure) -> int:
    """Return the distance of a failure from being the root cause, see Note [Root cause]."""
    extra = error_info(failure)
    is_unknown = failure.by_launcher is None
    if failure.by_launcher or (is_unknown and failure.exitcode == -signal.SIGTERM and not extra):
        return _TERMINATED
    if not extra:
        return _EXITED_AFTER_PEERS if failure.exitcode == 1 else _OWN_ERROR
    last_line = extra.get("py_callstack", "").rstrip().rpartition("\n")[2]
    return _CONSEQUENCE if any(text in last_line for text in _PEER_ERRORS) else _OWN_ERROR


def error_info(failure: RankFailure) -> dict[str, Any]:
    """Return the entries of a rank's error report, empty if it left none."""
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return extra if isinstance(extra, dict) else {}


def _line(rank: int, failure: RankFailure, world_size: int) -> str:
    on_host = f" on {failure.host}" if failure.host else ""
    name = f"rank {rank} of {world_size}{on_host} (local rank {failure.local_rank}, pid {failure.pid})"
    if failure.by_launcher:
        how = ""
        if failure.exitcode >= 0:
            how = f", with exit code {failure.exitcode}"
        elif failure.exitcode != -signal.SIGTERM:
            how = f" ({signal.Signals(-failure.exitcode).name})"
        return f"{name} {'was stopped, and ' if failure.was_stopped else ''}was terminated by the launcher{how}"
    if failure.exitcode >= 0:
        return f"{name} failed with exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGTERM:
        # A rank with an error report may have received the launcher's signal while it exited.
        is_foreign = failure.by_launcher is False and not error_info(failure)
        return f"{name} was terminated by SIGTERM{', which the launcher did not send' if is_foreign else ''}"
    return f"{name} was {killed_text(failure.exitcode)}"


def killed_text(exitcode: int) -> str:
    """Return the signal that killed a process, with its likely cause, by the negative exit code."""
    hint = ", as the system does when memory runs out" if exitcode == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-exitcode).name}{hint}"


_SSH_FAILED = 255
_CANNOT_START = 2

# (texts of ssh, reason, advice); the first match is used.
_SSH_REASONS = (
    (
        ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED", "host key is known"),
        "its host key does not match the known one",
        "verify it with the host's administrator, then log in once with `ssh {host}`, or add it to ~/.ssh/known_hosts "
        "with ssh-keyscan",
    ),
    (
        ("Permission denied", "Too many authentication failures", "no mutual signature"),
        "it accepts none of the offered keys",
        "make `ssh {host} true` work without a prompt (ssh-copy-id {host}), or pass the key with "
        '--ssh-options "-i KEY" and the user with --ssh-user',
    ),
    (
        ("Could not resolve hostname",),
        "the name can't be resolved",
        "correct the name, or add it to ~/.ssh/config or /etc/hosts",
    ),
    (
        ("timed out", "refused", "No route to host", "unreachable", "Connection closed", "Connection reset"),
        "it can't be reached",
        "check that the host is up and which port sshd listens on (--ssh-port), or drop the host with --exclude {host}",
    ),
    (
        ("Bad configuration", "Identity file", "unknown option", "illegal option", "usage: ssh", "command-line"),
        "ssh rejects its options",
        "correct --ssh-options; --dry-run shows the whole command",
    ),
)


@dataclass(slots=True, kw_only=True)
class HostExit:
    """Exit status of one host.

    Attributes:
        code: Exit code of ssh: that of the host's launcher, or 255 if ssh itself failed.
        has_started: Whether the host's launcher started.
        was_terminated: Whether it was terminated after a failure elsewhere or a signal.
        failures: Failed ranks of this host.
        world_size: Number of ranks of all hosts; 0 if no rank failed.
        error: Error message of its launcher, if it could not start or continue.
        output_tail: Last lines of stderr and stdout that no rank wrote: of ssh, the shell or the launcher.
    """

    host: str
    code: int = 0
    has_started: bool = False
    was_terminated: bool = False
    failures: Mapping[int, RankFailure] = field(default_factory=dict)
    world_size: int = 0
    error: Mapping[str, Any] | None = None
    output_tail: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """Exit code of the run and the final lines to print."""

    code: int
    text: str


def summarize(exits: Sequence[HostExit], signals: Sequence[signal.Signals]) -> ExitReport:
    """Return the exit report of a run, from the exit status of each host and the signals that this process received.

    The root cause comes last: a signal to this process, else a failed rank, a host that can't start, a lost host.
    """
    lost = [host_exit for host_exit in exits if _is_lost(host_exit)]
    crashed = [host_exit for host_exit in exits if _is_crashed(host_exit)]
    errors = [(host_exit.host, host_exit.error) for host_exit in exits if host_exit.error is not None]
    errors.sort(key=lambda pair: bool(pair[1]["is_consequence"]), reverse=True)
    failures = {rank: failure for host_exit in exits for rank, failure in host_exit.failures.items()}
    texts, code = [_lost_text(host_exit) for host_exit in lost], 0
    # A run may succeed without the lost hosts, if enough remain.
    has_succeeded = any(host_exit.code == 0 for host_exit in exits) and not any(
        host_exit.was_terminated for host_exit in exits
    )
    if lost and not has_succeeded:
        code = _SSH_FAILED if any(host_exit.has_started for host_exit in lost) else _CANNOT_START
    for host_exit in crashed:
        texts, code = [*texts, _crashed_text(host_exit)], host_exit.code
    for host, error in errors:
        texts, code = [*texts, f"booster run: {host}: {error['text']}"], _CANNOT_START
    if failures:
        text, failed_code = report(failures, max(host_exit.world_size for host_exit in exits)), exit_code_of(failures)
        if has_root_cause(failures) or code == 0:
            texts, code = [*texts, text], failed_code
        else:  # a consequence of the failure that is reported already
            texts.insert(0, text)
    if signals:
        texts.append(f"booster run: terminated by {signals[0].name}, with all ranks on all hosts")
        code = 128 + signals[0]
    return ExitReport(code=code, text="".join(f"{text}\n" for text in texts))


def was_lost(code: int | None) -> bool:
    """Return whether an exit code is that of a failed or killed ssh, rather than of the host's launcher."""
    return code is not None and (code == _SSH_FAILED or code < 0)


def _is_lost(host_exit: HostExit) -> bool:
    if host_exit.was_terminated and not host_exit.has_started:
        return host_exit.code == _SSH_FAILED  # ssh was connecting, and would have failed in any case
    return (
        was_lost(host_exit.code) and not host_exit.failures and host_exit.error is None and not host_exit.was_terminated
    )


def _is_crashed(host_exit: HostExit) -> bool:
    explained = (
        host_exit.failures or host_exit.error is not None or (host_exit.was_terminated and host_exit.has_started)
    )
    return host_exit.code != 0 and not was_lost(host_exit.code) and not explained


def _lost_text(host_exit: HostExit) -> str:
    tail = "; ".join(list(host_exit.output_tail)[-3:])
    if host_exit.has_started:
        return (
            f"booster run: the connection to {host_exit.host} was lost ({tail or 'no message from ssh'}), and its ranks"
            " with it: check that the host is up, and whether the system killed the launcher there for lack of memory"
        )
    output = "\n".join(host_exit.output_tail)
    matches = (rest for texts, *rest in _SSH_REASONS if any(text in output for text in texts))
    reason, advice = next(matches, ["ssh failed", "try `ssh {host} true`"])
    return f"booster run: can't start on {host_exit.host}: {reason} ({tail}): {advice.format(host=host_exit.host)}"


def _crashed_text(host_exit: HostExit) -> str:
    tail = "; ".join(list(host_exit.output_tail)[-3:])
    if host_exit.has_started:
        return (
            f"booster run: the launcher on {host_exit.host} exited with code {host_exit.code} ({tail}): see its output "
            f"above, after [{host_exit.host}]"
        )
    return (
        f"booster run: can't start on {host_exit.host}: the command exited with code {host_exit.code} ({tail}): this "
        "directory, this Python and torch-booster must exist at the same paths there; --dry-run shows the command"
    )
