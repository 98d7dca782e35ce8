"""Protocol from a node's launcher to the launcher that started it over ssh: JSON lines between those of the ranks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .exit_report import RankFailure, error_info

# Note [Launcher protocol]: ranks write into pipes of their node's launcher, which prefixes every line "[host:rank] ".
# So a line that begins with this character (the record separator of RFC 7464) is a message of the launcher, whatever
# a rank prints. All other lines without a prefix are output of ssh, the remote shell or the launcher for the user.
_SEPARATOR = b"\x1e"


def send_started() -> None:
    """Report that this node's launcher runs: later failures are not those of ssh, the shell or Python."""
    _send(event="started")


def send_failures(failures: Mapping[int, RankFailure], world_size: int) -> None:
    """Report the failed ranks of this node."""
    fields = {str(rank): asdict(failure) for rank, failure in failures.items()}
    for values in fields.values():
        del values["host"]  # it is known to the reader
    _send(event="failed", failures=fields, world_size=world_size, now_ns=time.time_ns())


def send_error(text: str, *, is_consequence: bool = False) -> None:
    """Report an error that keeps this node from starting its ranks, and whether another node's failure is its cause."""
    _send(event="refused", text=text, is_consequence=is_consequence)


def read_message(line: bytes) -> dict[str, Any] | None:
    """Return the message in a line, or None if the line is output."""
    if not line.startswith(_SEPARATOR):
        return None
    try:
        message = json.loads(line[1:])
    except ValueError:  # truncated as the host was lost
        return None
    return message if isinstance(message, dict) else None


def read_failures(message: Mapping[str, Any], host: str) -> dict[int, RankFailure]:
    """Return the failed ranks of a message, with times converted to this machine's clock."""
    clock_offset = time.time_ns() - message["now_ns"]
    failures = {}
    for rank, fields in message["failures"].items():
        failures[int(rank)] = failure = RankFailure(**fields | {"host": host})
        info = error_info(failure)
        if "time_ns" in info:
            info["time_ns"] += clock_offset
    return failures


def _send(**message: Any) -> None:
    sys.stderr.flush()
    sys.stderr.buffer.write(_SEPARATOR + json.dumps(message).encode() + b"\n")
    sys.stderr.buffer.flush()
