"""Exit report and exit code of a multi-node run: pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from booster.cli.failure import RankFailure, exit_code_of, has_root_cause, report

__all__ = ["ExitReport", "HostExit", "summarize", "was_lost"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostExit:
    """Exit status of one host.

    Attributes:
        host: Name of the host.
        code: Exit code of ssh: that of the host's launcher, or 255 if ssh itself failed.
        has_started: Whether the host's launcher started.
        was_told_to_end: Whether it was terminated after a failure elsewhere or a signal.
        failures: Failed ranks of this host.
        world_size: Number of ranks of all hosts; 0 if no rank failed.
        refusal: Error message of its launcher, if it could not start or continue.
        last_words: Last lines of stderr and stdout that no rank wrote: of ssh, the shell or the launcher.
    """

    host: str
    code: int
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
    """Return the exit report of a run.

    The root cause comes last: a signal to this process, else a failed rank, a host that can't start, a lost host.

    Args:
        exits: Exit status of each host.
        signals: Signals that this process received.
    """
    lost = [host_exit for host_exit in exits if _is_lost(host_exit)]
    crashed = [host_exit for host_exit in exits if _is_crashed(host_exit)]
    errors = sorted(
        (host_exit for host_exit in exits if host_exit.error is not None), key=_is_consequence, reverse=True
    )
    failures = {rank: failure for host_exit in exits for rank, failure in host_exit.failures.items()}
    texts, code = [_lost_text(host_exit) for host_exit in lost], 0
    if lost and not _has_succeeded(exits):
        code = _SSH_FAILED if any(host_exit.has_started for host_exit in lost) else _CANNOT_START
    for host_exit in crashed:
        texts, code = [*texts, _crashed_text(host_exit)], host_exit.code
    for host_exit in errors:
        texts, code = [*texts, f"booster run: {host_exit.host}: {_error_of(host_exit)['text']}"], _CANNOT_START
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


def _has_succeeded(exits: Sequence[HostExit]) -> bool:
    """Return whether the run succeeded, possibly without lost hosts."""
    return any(host_exit.code == 0 for host_exit in exits) and not any(host_exit.was_terminated for host_exit in exits)


def _is_consequence(host_exit: HostExit) -> bool:
    return bool(_error_of(host_exit)["is_consequence"])


def _error_of(host_exit: HostExit) -> Mapping[str, Any]:
    return host_exit.error or {"text": "", "is_consequence": True}


def _lost_text(host_exit: HostExit) -> str:
    tail = "; ".join(host_exit.output_tail[-3:])
    if host_exit.has_started:
        return (
            f"booster run: the connection to {host_exit.host} was lost ({tail or 'no message from ssh'}), and its ranks with"
            " it: check that the host is up, and whether the system killed the launcher there for lack of memory"
        )
    output = "\n".join(host_exit.output_tail)
    matches = (rest for texts, *rest in _SSH_REASONS if any(sign in output for sign in texts))
    reason, advice = next(matches, ["ssh failed", "try `ssh {host} true`"])
    return f"booster run: can't start on {host_exit.host}: {reason} ({tail}): {advice.format(host=host_exit.host)}"


def _crashed_text(host_exit: HostExit) -> str:
    tail = "; ".join(host_exit.output_tail[-3:])
    if host_exit.has_started:
        return (
            f"booster run: the launcher on {host_exit.host} exited with code {host_exit.code} ({tail}): see its output above, "
            f"after [{host_exit.host}]"
        )
    return (
        f"booster run: can't start on {host_exit.host}: the command exited with code {host_exit.code} ({tail}): this "
        "directory, this Python and torch-booster must exist at the same paths there; --dry-run shows the command"
    )
