"""Trace of the chunk uses of one iteration, which placement and prefetching look ahead in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

# The first iteration is traced as a sequence of module starts with the chunks that they need. Later iterations look
# ahead in it. They may deviate (conditional modules), so a lookup never affects results: a wrong guess only costs time.


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Start of a module's forward or backward, with its memory use.

    Attributes:
        chunks: Indices of the chunks that it needs, without duplicates.
        is_backward: True if gradients of the chunks are produced.
        other_bytes: Peak of memory that is not model data (activations and temporaries) in the compute tier, until the
            next event.
    """

    chunks: tuple[int, ...]
    is_backward: bool
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace of one iteration. Events are numbered from 0."""

    events: tuple[TraceEvent, ...]
    # Per chunk: the events that need it, ascending.
    _uses: dict[int, list[int]] = field(init=False, repr=False, compare=False)
    # Event and chunk of each use that does not merely continue the previous event's. Consecutive modules mostly use the
    # same chunk, so this is far shorter than the events.
    _arrivals: list[tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        uses: dict[int, list[int]] = {}
        arrivals = []
        for now, event in enumerate(self.events):
            for chunk in event.chunks:
                positions = uses.setdefault(chunk, [])
                if not positions or positions[-1] < now - 1:
                    arrivals.append((now, chunk))
                positions.append(now)
        object.__setattr__(self, "_uses", uses)
        object.__setattr__(self, "_arrivals", arrivals)

    def next_use(self, chunk: int, now: int) -> int | None:
        """Return the first event from `now` on that needs a chunk, in O(log n).

        A chunk without another use in this iteration gets its first use in the next one, whose event numbers continue
        this one's. So the results for two chunks are comparable. None for a chunk that is never used.
        """
        positions = self._uses.get(chunk)
        if positions is None:
            return None
        index = bisect_left(positions, now)
        return positions[index] if index < len(positions) else len(self.events) + positions[0]

    def upcoming(self, now: int, limit: int) -> list[int]:
        """Return the next chunks needed in this iteration from event `now` on, at most `limit`, in order of use."""
        found: dict[int, None] = {}
        if limit > 0:
            arrivals = range(bisect_left(self._arrivals, (now + 1, -1)), len(self._arrivals))
            current = self.events[now].chunks if now < len(self.events) else ()
            for chunk in chain(current, (self._arrivals[index][1] for index in arrivals)):
                found[chunk] = None
                if len(found) == limit:
                    break
        return list(found)

    def peak_other_bytes(self, now: int, until: int) -> int:
        """Return the largest `other_bytes` of the events in `[now, until)`, 0 if there are none."""
        return max((event.other_bytes for event in self.events[now:until]), default=0)


class Tracer:
    """Recorder of one iteration: the `record_*` methods, then `trace()`."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._early_bytes = 0

    def record_use(self, chunks: Iterable[int], is_backward: bool) -> None:
        """Record the start of a module's forward or backward that needs these chunks; duplicates are ignored."""
        self._events.append(
            TraceEvent(
                chunks=tuple(dict.fromkeys(chunks)),
                is_backward=is_backward,
                other_bytes=0 if self._events else self._early_bytes,
            )
        )

    def record_other_bytes(self, num_bytes: int) -> None:
        """Record the other memory in the compute tier; an event keeps its peak.

        Values from before the first event count for the first, as that memory is in use when its module starts.
        """
        if not self._events:
            self._early_bytes = max(self._early_bytes, num_bytes)
        elif num_bytes > self._events[-1].other_bytes:
            self._events[-1] = replace(self._events[-1], other_bytes=num_bytes)

    def trace(self) -> Trace:
        """Return the trace of the recorded iteration."""
        return Trace(tuple(self._events))


class Cursor:
    """Position in a trace during a later iteration, which may skip, repeat or add modules.

    The cursor does not move for a module that the trace lacks within the next `lookahead` events. Each miss extends the
    next search by another `lookahead` events. So the cursor catches up with an iteration that skips many modules, and
    never runs far ahead of one that repeats some.

    Args:
        trace: Trace to follow.
        lookahead: Search distance in events.

    Attributes:
        trace: Trace to follow.
        now: Number of the last event reached, initially 0.
    """

    def __init__(self, trace: Trace, lookahead: int = 64) -> None:
        self.trace = trace
        self._lookahead = lookahead
        self._positions: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for now, event in enumerate(trace.events):
            self._positions.setdefault((event.chunks, event.is_backward), []).append(now)
        self.restart()

    def restart(self) -> None:
        """Reset to the start of an iteration."""
        self.now = 0
        self._next = 0
        self._reach = self._lookahead

    def advance(self, chunks: Iterable[int], is_backward: bool) -> int:
        """Advance to the next event that needs the same chunks, in this order, and return its number."""
        positions = self._positions.get((tuple(dict.fromkeys(chunks)), is_backward), [])
        index = bisect_left(positions, self._next)
        if index < len(positions) and positions[index] < self._next + self._reach:
            self.now = positions[index]
            self._next = self.now + 1
            self._reach = self._lookahead
        else:
            self._reach += self._lookahead
        return self.now
