"""How often this rank communicated and how many bytes it moved, for tests and reports that ask."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["CommunicationCount", "count_communication", "record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationCount:
    """What this rank did while it was counted, by the operation's name.

    Point-to-point messages, and what is made of them (on the CPU reduce_scatter and all_gather), count the bytes of
    their payloads. The others count what theory asks of a rank: an all_reduce 2(P-1)/P of the tensor each way; a
    broadcast the tensor, once from its source and once to every other rank.

    Attributes:
        calls: Operations started; none where a group has one rank, as nothing is communicated.
        sent: Bytes from this rank.
        received: Bytes to this rank.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)


# A tuple that is replaced, so that threads that communicate meanwhile read the old one or the new one.
_attached: tuple[CommunicationCount, ...] = ()
_lock = threading.Lock()


@contextmanager
def count_communication() -> Iterator[CommunicationCount]:
    """Counts what all threads of this process communicate through this package within the block.

    Blocks may be nested: each counts all that happens in it. No communication of its own.
    """
    global _attached
    count = CommunicationCount()
    with _lock:
        _attached = (*_attached, count)
    try:
        yield count
    finally:
        with _lock:
            _attached = tuple(other for other in _attached if other is not count)


def record(name: str, *, calls: int = 1, sent: int = 0, received: int = 0) -> None:
    """Adds to every count that is attached."""
    if not _attached:
        return
    with _lock:
        for count in _attached:
            count.calls[name] += calls
            count.sent[name] += sent
            count.received[name] += received
