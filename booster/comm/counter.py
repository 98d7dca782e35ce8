"""Counts of this rank's collectives and bytes, for tests and reports."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["CommunicationCount", "count_communication", "record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationCount:
    """Calls and bytes of this rank, by operation name.

    Point-to-point messages, and collectives made of them (on the CPU reduce_scatter and all_gather), count the bytes of
    their payloads. Others count the theoretical volume of a rank: an all_reduce 2(P-1)/P of the tensor each way; a
    broadcast the tensor, once from its source and once to every other rank.

    Attributes:
        calls: Number of operations; 0 in groups of one rank, which communicate nothing.
        sent: Bytes sent by this rank.
        received: Bytes received by this rank.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)


# An immutable tuple, replaced as a whole: other threads read the old one or the new one.
_attached: tuple[CommunicationCount, ...] = ()
_counter_lock = threading.Lock()


@contextmanager
def count_communication() -> Iterator[CommunicationCount]:
    """Count the communication of all threads of this process through this package in the block.

    Blocks may be nested; each counts everything inside of it. No communication.
    """
    global _attached
    count = CommunicationCount()
    with _counter_lock:
        _attached = (*_attached, count)
    try:
        yield count
    finally:
        with _counter_lock:
            _attached = tuple(other for other in _attached if other is not count)


def record(name: str, *, calls: int = 1, sent: int = 0, received: int = 0) -> None:
    """Add to all active counts."""
    if not _attached:
        return
    with _counter_lock:
        for count in _attached:
            count.calls[name] += calls
            count.sent[name] += sent
            count.received[name] += received
