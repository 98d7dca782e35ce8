"""Exit report and exit code of a multi-node run: pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from booster.cli.failure import RankFailure, exit_code_of, has_cause, report

__all__ = ["HostEnd", "Verdict", "judge", "was_lost"]

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
class HostEnd:
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
    was_told_to_end: bool = False
    failures: Mapping[int, RankFailure] = field(default_factory=dict)
    world_size: int = 0
    refusal: Mapping[str, Any] | None = None
    last_words: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Exit code of the run and the final lines to print."""

    code: int
    text: str


def judge(ends: Sequence[HostEnd], told: Sequence[signal.Signals]) -> Verdict:
    """Return the exit report of a run.

    The root cause comes last: a signal to this process, else a failed rank, a host that can't start, a lost host.

    Args:
        ends: Exit status of each host.
        told: Signals that this process received.
    """
    lost = [end for end in ends if _is_lost(end)]
    broken = [end for end in ends if _is_broken(end)]
    refused = sorted((end for end in ends if end.refusal is not None), key=_is_consequence, reverse=True)
    failures = {rank: failure for end in ends for rank, failure in end.failures.items()}
    texts, code = [_lost_text(end) for end in lost], 0
    if lost and not _is_enough(ends):
        code = _SSH_FAILED if any(end.has_started for end in lost) else _CANNOT_START
    for end in broken:
        texts, code = [*texts, _broken_text(end)], end.code
    for end in refused:
        texts, code = [*texts, f"booster run: {end.host}: {_refusal(end)['text']}"], _CANNOT_START
    if failures:
        text, failed_code = report(failures, max(end.world_size for end in ends)), exit_code_of(failures)
        if has_cause(failures) or code == 0:
            texts, code = [*texts, text], failed_code
        else:  # a consequence of the failure that is reported already
            texts.insert(0, text)
    if told:
        texts.append(f"booster run: terminated by {told[0].name}, with all ranks on all hosts")
        code = 128 + told[0]
    return Verdict(code=code, text="".join(f"{text}\n" for text in texts))


def was_lost(code: int | None) -> bool:
    """Return whether an exit code is that of a failed or killed ssh, rather than of the host's launcher."""
    return code is not None and (code == _SSH_FAILED or code < 0)


def _is_lost(end: HostEnd) -> bool:
    if end.was_told_to_end and not end.has_started:
        return end.code == _SSH_FAILED  # ssh was connecting, and would have failed in any case
    return was_lost(end.code) and not end.failures and end.refusal is None and not end.was_told_to_end


def _is_broken(end: HostEnd) -> bool:
    explained = end.failures or end.refusal is not None or (end.was_told_to_end and end.has_started)
    return end.code != 0 and not was_lost(end.code) and not explained


def _is_enough(ends: Sequence[HostEnd]) -> bool:
    """Return whether the run succeeded, possibly without lost hosts."""
    return any(end.code == 0 for end in ends) and not any(end.was_told_to_end for end in ends)


def _is_consequence(end: HostEnd) -> bool:
    return bool(_refusal(end)["is_consequence"])


def _refusal(end: HostEnd) -> Mapping[str, Any]:
    return end.refusal or {"text": "", "is_consequence": True}


def _lost_text(end: HostEnd) -> str:
    words = "; ".join(end.last_words[-3:])
    if end.has_started:
        return (
            f"booster run: the connection to {end.host} was lost ({words or 'no message from ssh'}), and its ranks with"
            " it: check that the host is up, and whether the system killed the launcher there for lack of memory"
        )
    said = "\n".join(end.last_words)
    known = (rest for signs, *rest in _SSH_REASONS if any(sign in said for sign in signs))
    reason, advice = next(known, ["ssh failed", "try `ssh {host} true`"])
    return f"booster run: can't start on {end.host}: {reason} ({words}): {advice.format(host=end.host)}"


def _broken_text(end: HostEnd) -> str:
    words = "; ".join(end.last_words[-3:])
    if end.has_started:
        return (
            f"booster run: the launcher on {end.host} exited with code {end.code} ({words}): see its output above, "
            f"after [{end.host}]"
        )
    return (
        f"booster run: can't start on {end.host}: the command exited with code {end.code} ({words}): this "
        "directory, this Python and torch-booster must exist at the same paths there; --dry-run shows the command"
    )
