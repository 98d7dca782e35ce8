"""What one iteration needs, and when: the record that placement and prefetching look ahead in. Numbers only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace

__all__ = ["Cursor", "Moment", "Record", "Tracer"]

# Note [Moments]
# A moment is "the forward or backward of a module begins that needs these chunks". The first iteration is recorded as
# its sequence of moments, and later iterations look ahead in it. They may deviate (a module that runs under a
# condition), so nothing that is looked up here decides what a module computes with: a wrong guess costs time alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The forward or backward of a module, as far as memory is concerned.

    Attributes:
        chunks: Numbers of the chunks that it needs, each once.
        is_backward: Their gradients come into being, too.
        model_bytes: Weights, gradients and optimizer states in the compute tier when it began.
        other_bytes: Largest seen of everything else there (activations and temporaries) until the next moment.
    """

    chunks: tuple[int, ...]
    is_backward: bool
    model_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """The moments of one iteration, in order. Moments are numbered from 0.

    Attributes:
        moments: What was needed, in this order.
        completed: Numbers of the chunks, in the order in which their gradients were complete.
    """

    moments: tuple[Moment, ...]
    completed: tuple[int, ...]
    # Per chunk: the moments that need it, ascending.
    _uses: dict[int, list[int]] = field(init=False, repr=False, compare=False)
    # Moment and chunk of each use that does not merely go on from the moment before. Modules in a row mostly use the
    # same chunk, so this is far shorter than the moments.
    _arrivals: list[tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        uses: dict[int, list[int]] = {}
        arrivals = []
        for now, moment in enumerate(self.moments):
            for chunk in moment.chunks:
                positions = uses.setdefault(chunk, [])
                if not positions or positions[-1] < now - 1:
                    arrivals.append((now, chunk))
                positions.append(now)
        object.__setattr__(self, "_uses", uses)
        object.__setattr__(self, "_arrivals", arrivals)

    def next_use(self, chunk: int, now: int) -> int | None:
        """Returns the first moment from `now` on that needs a chunk, in O(log n).

        Iterations follow each other: if this one does not need it any more, it is the first use in the next one, whose
        moments are numbered on from this one's. So the answers for two chunks compare as they should.

        Args:
            chunk: Number of the chunk.
            now: Number of a moment, from 0 to the number of moments.

        Returns:
            The moment's number, or None for a chunk that is never used.
        """
        positions = self._uses.get(chunk)
        if positions is None:
            return None
        index = bisect_left(positions, now)
        return positions[index] if index < len(positions) else len(self.moments) + positions[0]

    def upcoming(self, now: int, limit: int, skip: Container[int]) -> list[int]:
        """Returns the next chunks that are needed, in the order in which they are, within this iteration.

        Args:
            now: First moment that counts, from 0 to the number of moments.
            limit: How many chunks at most.
            skip: Chunks that are left out, such as those that are there already.
        """
        found: dict[int, None] = {}
        if limit > 0:
            for chunk in self._chunks_from(now):
                if chunk not in skip:
                    found[chunk] = None
                    if len(found) == limit:
                        break
        return list(found)

    def peak_other_bytes(self, now: int, until: int) -> int:
        """Returns the largest `other_bytes` of the moments from `now` to before `until`, 0 if there are none."""
        return max((moment.other_bytes for moment in self.moments[now:until]), default=0)

    def _chunks_from(self, now: int) -> Iterator[int]:
        """Yields the chunks that are needed from a moment on, some of them several times."""
        if now < len(self.moments):
            yield from self.moments[now].chunks
        for index in range(bisect_left(self._arrivals, (now + 1, -1)), len(self._arrivals)):
            yield self._arrivals[index][1]


class Tracer:
    """Writes down an iteration while it runs: `begin()`, then what happens as it happens, then `finish()`."""

    def __init__(self) -> None:
        self._is_recording = False
        self._moments: list[Moment] = []
        self._completed: dict[int, None] = {}
        self._early_bytes = 0

    @property
    def is_recording(self) -> bool:
        """An iteration was begun and not finished."""
        return self._is_recording

    def begin(self) -> None:
        """Begins an iteration. One that was begun and not finished (its forward failed, say) is forgotten."""
        self._is_recording = True
        self._moments = []
        self._completed = {}
        self._early_bytes = 0

    def note_use(self, chunks: Iterable[int], is_backward: bool, model_bytes: int) -> None:
        """Notes that a module begins that needs chunks: a new moment.

        Args:
            chunks: Their numbers; one that is named twice counts once.
            is_backward: It is the module's backward.
            model_bytes: Weights, gradients and optimizer states in the compute tier now.
        """
        assert self._is_recording, "a moment was noted outside of an iteration"
        self._moments.append(
            Moment(
                chunks=_once_each(chunks),
                is_backward=is_backward,
                model_bytes=model_bytes,
                other_bytes=0 if self._moments else self._early_bytes,
            )
        )

    def note_other_bytes(self, num_bytes: int) -> None:
        """Notes how much else is in the compute tier; the largest value since the moment began counts.

        What is noted before the first moment counts for the first: its module finds that memory taken.
        """
        assert self._is_recording, "bytes were noted outside of an iteration"
        if not self._moments:
            self._early_bytes = max(self._early_bytes, num_bytes)
        elif num_bytes > self._moments[-1].other_bytes:
            self._moments[-1] = replace(self._moments[-1], other_bytes=num_bytes)

    def note_complete(self, chunk: int) -> None:
        """Notes that the gradients of a chunk are complete; its first time counts."""
        assert self._is_recording, "a complete chunk was noted outside of an iteration"
        self._completed.setdefault(chunk)

    def finish(self) -> Record:
        """Ends the iteration and returns its record."""
        assert self._is_recording, "no iteration was begun"
        self._is_recording = False
        return Record(tuple(self._moments), tuple(self._completed))


class Cursor:
    """Follows a record during a later iteration, which may leave modules out, repeat them, or have new ones.

    A module that the record does not foresee within the next `lookahead` moments leaves the cursor where it is. Each
    such miss adds another `lookahead` moments to how far the next search goes, so that the cursor catches up with an
    iteration that left out a long stretch, and never runs far ahead of one that repeats something.

    Args:
        record: What to follow.
        lookahead: How many moments a search goes ahead.
    """

    def __init__(self, record: Record, lookahead: int = 64) -> None:
        self._lookahead = lookahead
        self._positions: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for now, moment in enumerate(record.moments):
            self._positions.setdefault((moment.chunks, moment.is_backward), []).append(now)
        self.restart()

    @property
    def now(self) -> int:
        """The moment that was reached last; 0 at the beginning."""
        return self._now

    def restart(self) -> None:
        """Goes back to the beginning: an iteration begins."""
        self._now = 0
        self._next = 0
        self._reach = self._lookahead

    def advance(self, chunks: Iterable[int], is_backward: bool) -> int:
        """Returns the moment that a module which begins now is: the next one that needs the same chunks.

        Args:
            chunks: Numbers of the chunks that the module needs, in the same order as they were recorded.
            is_backward: It is the module's backward.
        """
        positions = self._positions.get((_once_each(chunks), is_backward), [])
        index = bisect_left(positions, self._next)
        if index < len(positions) and positions[index] < self._next + self._reach:
            self._now = positions[index]
            self._next = self._now + 1
            self._reach = self._lookahead
        else:
            self._reach += self._lookahead
        return self._now


def _once_each(chunks: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(chunks))
