"""What the simulated device has seen: faults, waits of the host, collectives, each with its place in Python."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# "race": an access without an order to another; "lifetime": memory freed while another stream uses it; "pinned":
# memory of a copy that the host changed too early; "mismatch": ranks at different collectives.
FAULTS = ("race", "lifetime", "pinned", "mismatch")
_ROOT = f"{Path(__file__).parents[2]}/"
_SHOWN_FRAMES = 4
_OWN = ("simulated_cuda/", ".venv/")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the device has seen.

    Attributes:
        kind: One of `FAULTS`, "sync" (the host waited for the device), "pageable" (a copy to the device that did not
            wait, from memory that is not pinned), or "collective".
        text: What happened.
        place: Where Python was, innermost frame first.
    """

    kind: str
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} [{self.place}]"


@dataclass(slots=True)
class Record:
    """Events of a block of `recording`, with their numbers."""

    events: Counter[Event] = field(default_factory=Counter)

    def count(self, *kinds: str) -> int:
        """Return the number of events of these kinds."""
        return sum(number for event, number in self.events.items() if event.kind in kinds)

    def collectives(self) -> Counter[str]:
        """Return the number of collectives and messages by name."""
        found: Counter[str] = Counter()
        for event, number in self.events.items():
            if event.kind == "collective":
                found[event.text] += number
        return found

    def faults(self) -> list[str]:
        """Return the faults as text."""
        return [f"{number} x {event}" for event, number in self.events.items() if event.kind in FAULTS]

    def describe(self, *kinds: str) -> str:
        """Return the events of these kinds as lines, the most frequent first."""
        return "\n".join(f"{number} x {event}" for event, number in self.events.most_common() if event.kind in kinds)


_lock = threading.Lock()
_records: tuple[Record, ...] = ()


@contextmanager
def recording() -> Iterator[Record]:
    """Record the events of all threads of this process in the block. Blocks may be nested."""
    global _records
    record = Record()
    with _lock:
        _records = (*_records, record)
    try:
        yield record
    finally:
        with _lock:
            _records = tuple(other for other in _records if other is not record)


def report(kind: str, text: str) -> None:
    """Add an event to all active records. Called by the device."""
    if not _records:
        return
    event = Event(kind, text, place())
    with _lock:
        for record in _records:
            record.events[event] += 1


def place() -> str:
    """Return where this thread is, as frames of this repository, innermost first."""
    frames: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < _SHOWN_FRAMES:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT) and not any(part in path for part in _OWN):
            frames.append(f"{path.removeprefix(_ROOT)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(frames) or f"outside of the repository, in {threading.current_thread().name}"
