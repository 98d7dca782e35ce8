"""What the launcher on a host tells the one that started it there by ssh: lines of JSON between those of the ranks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from booster.cli.failure import RankFailure

__all__ = ["rank_prefix", "read_failures", "read_message", "tell_failures", "tell_refusal", "tell_started"]

# Note [Lines of a host]: ranks write into pipes of their host's launcher, which puts "[host:rank] " before every line.
# So a line that begins with this character (the record separator of RFC 7464) is the launcher's own word, whatever
# a rank prints. All other lines without such a prefix are of ssh, of the shell there, or a message for the user.
_SEPARATOR = b"\x1e"


def rank_prefix(host: str, rank: str) -> bytes:
    """Returns what stands before each line of a rank."""
    return f"[{host}:{rank}] ".encode()


def tell_started() -> None:
    """Says that the host's launcher runs: what goes wrong from here on is not ssh's, the shell's or Python's doing."""
    _tell(event="started")


def tell_failures(failures: Mapping[int, RankFailure], world_size: int) -> None:
    """Says which ranks of this host failed and how."""
    told = {
        str(rank): {
            "local_rank": failure.local_rank,
            "pid": failure.pid,
            "exitcode": failure.exitcode,
            "error_file_data": failure.error_file_data,
            "by_launcher": failure.by_launcher,
            "was_stopped": failure.was_stopped,
        }
        for rank, failure in failures.items()
    }
    _tell(event="failed", failures=told, world_size=world_size, now_ns=time.time_ns())


def tell_refusal(text: str, *, is_consequence: bool = False) -> None:
    """Says why this host can't start its ranks, or can't go on where that is another host's doing."""
    _tell(event="refused", text=text, is_consequence=is_consequence)


def read_message(line: bytes) -> dict[str, Any] | None:
    """Returns what a line says, None for one that is for the user."""
    if not line.startswith(_SEPARATOR):
        return None
    try:
        message = json.loads(line[1:])
    except ValueError:  # cut off as the host went away
        return None
    return message if isinstance(message, dict) else None


def read_failures(message: Mapping[str, Any], host: str) -> dict[int, RankFailure]:
    """Returns the failed ranks of a message, their times as this machine's clock would have said them."""
    behind = time.time_ns() - message["now_ns"]
    failures = {}
    for rank, told in message["failures"].items():
        data = told["error_file_data"]
        inner = data.get("message")
        extra = inner.get("extraInfo") if isinstance(inner, dict) else None
        if isinstance(extra, dict) and "time_ns" in extra:
            extra["time_ns"] += behind
        failures[int(rank)] = RankFailure(host=host, **told)
    return failures


def _tell(**message: Any) -> None:
    sys.stderr.flush()
    sys.stderr.buffer.write(_SEPARATOR + json.dumps(message).encode() + b"\n")
    sys.stderr.buffer.flush()
