"""What to say at the end of a run over several hosts, and its exit code: pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from booster.cli.failure import RankFailure, exit_code_of, has_cause, report

__all__ = ["HostEnd", "Verdict", "judge", "was_lost"]

_SSH_FAILED = 255
_CANNOT_START = 2

# What ssh says, and what to do about it. The first that fits.
_SSH_REASONS = (
    (
        ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED", "host key is known"),
        "its host key is not the one that is known here",
        "compare it with the host's administrator's, then log in once by hand with `ssh {host}`, or add it to "
        "~/.ssh/known_hosts with ssh-keyscan",
    ),
    (
        ("Permission denied", "Too many authentication failures", "no mutual signature"),
        "it accepts none of the keys that were offered",
        "make `ssh {host} true` work without a question (ssh-copy-id {host}), or name the key with "
        '--ssh-options "-i KEY" and the user with --ssh-user',
    ),
    (
        ("Could not resolve hostname",),
        "nobody knows this name",
        "correct the name, or add it to ~/.ssh/config or /etc/hosts",
    ),
    (
        ("timed out", "refused", "No route to host", "unreachable", "Connection closed", "Connection reset"),
        "it can't be reached",
        "look whether the host is up and sshd listens there, and on which port (--ssh-port), or leave the host out "
        "with --exclude {host}",
    ),
    (
        ("Bad configuration", "Identity file", "unknown option", "illegal option", "usage: ssh", "command-line"),
        "ssh does not understand its options",
        "correct --ssh-options; --dry-run shows the whole command",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnd:
    """How one host's part of the run ended.

    Attributes:
        host: Its name.
        code: Exit code of ssh, which is that of the host's launcher; 255 where ssh itself failed.
        has_started: Whether the host's launcher got to run.
        was_told_to_end: Whether it was ended because of others.
        failures: Its failed ranks.
        world_size: Ranks of all hosts, where ranks failed.
        refusal: What its launcher said where it could not start or go on.
        last_words: Last lines that are of no rank: ssh's, the shell's, the launcher's.
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
    """The exit code, and lines to print last."""

    code: int
    text: str


def judge(ends: Sequence[HostEnd], told: Sequence[signal.Signals]) -> Verdict:
    """Returns the verdict on a run from how each host ended, and which signals this process got.

    What led to the end comes last: a signal here, else a failed rank, a host that can't start, a host that was lost.
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
        else:  # their peers went away, for the reason that is said already
            texts.insert(0, text)
    if told:
        texts.append(f"booster run: ended by {told[0].name}, and all ranks on all hosts with it")
        code = 128 + told[0]
    return Verdict(code=code, text="".join(f"{text}\n" for text in texts))


def was_lost(code: int | None) -> bool:
    """Returns whether an exit code of ssh is of its own making, or it was killed, rather than the host's launcher's."""
    return code is not None and (code == _SSH_FAILED or code < 0)


def _is_lost(end: HostEnd) -> bool:
    if end.was_told_to_end and not end.has_started:
        return end.code == _SSH_FAILED  # ssh was on its way there, and would have failed in any case
    return was_lost(end.code) and not end.failures and end.refusal is None and not end.was_told_to_end


def _is_broken(end: HostEnd) -> bool:
    explained = end.failures or end.refusal is not None or (end.was_told_to_end and end.has_started)
    return end.code != 0 and not was_lost(end.code) and not explained


def _is_enough(ends: Sequence[HostEnd]) -> bool:
    """Returns whether the run ended well, perhaps without hosts that were lost."""
    return any(end.code == 0 for end in ends) and not any(end.was_told_to_end for end in ends)


def _is_consequence(end: HostEnd) -> bool:
    return bool(_refusal(end)["is_consequence"])


def _refusal(end: HostEnd) -> Mapping[str, Any]:
    return end.refusal or {"text": "", "is_consequence": True}


def _lost_text(end: HostEnd) -> str:
    words = "; ".join(end.last_words[-3:])
    if end.has_started:
        return (
            f"booster run: the connection to {end.host} was lost ({words or 'ssh says nothing'}), and its ranks end "
            "with it: look whether the host is up, or whether the system killed the launcher there for want of memory"
        )
    said = "\n".join(end.last_words)
    known = (rest for signs, *rest in _SSH_REASONS if any(sign in said for sign in signs))
    reason, advice = next(known, ["ssh failed", "try `ssh {host} true`"])
    return f"booster run: can't start on {end.host}: {reason} ({words}): {advice.format(host=end.host)}"


def _broken_text(end: HostEnd) -> str:
    words = "; ".join(end.last_words[-3:])
    if end.has_started:
        return (
            f"booster run: the launcher on {end.host} ended with exit code {end.code} ({words}): its output is above, "
            f"after [{end.host}]"
        )
    return (
        f"booster run: can't start on {end.host}: the command there ended with exit code {end.code} ({words}): this "
        "folder, this Python and torch-booster must be there at the same paths as here; --dry-run shows the command"
    )
