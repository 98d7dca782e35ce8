"""Where this rank is: the phase of its training loop, its step, and the communication that it is in."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch.distributed as dist

__all__ = [
    "PARTS_OF_SAVE",
    "PHASES",
    "Communication",
    "CurrentPlace",
    "OperationPlace",
    "Phase",
    "PhaseObserver",
    "call_on_entry",
    "current_place",
    "end_step",
    "in_phase",
    "observers",
    "watch_phases",
]

# Note [Phases]
# What a training loop calls enters a phase: "boost", "data", "forward", "evaluate" (a forward in evaluation mode
# without gradients), "backward", "clip", "step", "pipeline", "save", "load"; a save has the parts "save plan", "save
# write" and "commit", in the thread that does them; and inside of any of them is "communication", with the operation
# that this rank is in. Phases nest. Each thread has its own, on a track that other threads may read:
# the one that notices that a rank hangs is not the one that does. Entering and leaving is always noted, as an error
# about a lost rank wants to say where this one was, and costs half a microsecond; more is done only on a track with
# observers. Every moment belongs to the innermost phase, so the times of all phases, with those outside of any, add up
# to the clock's.

P = ParamSpec("P")
R = TypeVar("R")

PARTS_OF_SAVE = ("save plan", "save write", "commit")

# All phases but "communication", whose operations have names of their own.
_OF_TRAINING = ("boost", "data", "forward", "evaluate", "backward", "clip", "step", "pipeline")
PHASES = (*_OF_TRAINING, "save", *PARTS_OF_SAVE, "load")


class Communication(Protocol):
    """What a phase has to know of an operation between ranks; see `booster.comm.operation.Operation`."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def number(self) -> int: ...

    @property
    def peer(self) -> int | None: ...


class PhaseObserver:
    """Is told what the thread does that watches with it. Here nothing happens; a subclass overrides what it wants."""

    def spent(self, name: str | None, seconds: float) -> None:
        """This much more time was spent with a phase as the innermost one; None: outside of all phases."""

    def forward_called(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A boosted model begins with a batch that it trains on."""

    def loss_given(self, optimizer: Any, loss: Any, num_items: float | None) -> None:
        """An optimizer begins with the backward of a loss: a mean, or a sum over so many items."""

    def loss_is_elsewhere(self, optimizer: Any) -> None:
        """An optimizer ends the backward of a loss that another pipeline stage is told of."""

    def gradients_known(self, optimizer: Any, named: Callable[[], Iterator[tuple[str, Any]]]) -> None:
        """An optimizer has the gradients that it will step with; `named` gives this rank's, by the user's names."""

    def step_ended(self, optimizer: Any) -> None:
        """An optimizer has stepped, or skipped its step."""


class _PastOperation:
    """An operation that has ended. Its group, which holds memory and connections, is not kept for it."""

    __slots__ = ("_group", "name", "number", "peer")

    def __init__(self, operation: Communication) -> None:
        self.name, self.number, self.peer = operation.name, operation.number, operation.peer
        self._group = None if operation.group is None else weakref.ref(operation.group)

    def place(self) -> OperationPlace | None:
        """Returns it in plain words; None: its group is gone."""
        group = None if self._group is None else self._group()
        return None if group is None and self._group is not None else _place_of(self, group)


class _Track:
    """The phases of one thread."""

    __slots__ = ("__weakref__", "accounted", "last_operation", "num_steps", "observers", "phase")

    def __init__(self) -> None:
        self.phase: Phase | None = None
        self.last_operation: _PastOperation | None = None
        self.num_steps = 0
        self.observers: tuple[PhaseObserver, ...] = ()
        self.accounted = 0.0

    def account(self, now: float) -> None:
        """Tells what the time since the last call was spent with."""
        name = None if self.phase is None else self.phase.name
        seconds, self.accounted = now - self.accounted, now
        for observer in self.observers:
            observer.spent(name, seconds)


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.track = _Track()
        with _lock:
            _tracks[threading.get_ident()] = self.track


_lock = threading.Lock()
_tracks: WeakValueDictionary[int, _Track] = WeakValueDictionary()  # a thread's track ends with it
_here = _OfThisThread()


class Phase:
    """The context of a phase; see Note [Phases].

    Args:
        name: Which phase.
        operation: The communication that this rank is in meanwhile.
    """

    __slots__ = ("_track", "name", "operation", "outer", "since")

    def __init__(self, name: str, operation: Communication | None = None) -> None:
        self.name = name
        self.operation = operation

    def __enter__(self) -> Phase:
        self._track = track = _here.track
        self.since = now = time.perf_counter()
        if track.observers:
            track.account(now)
        self.outer = track.phase
        track.phase = self
        if _on_entry is not None:
            self._tell_entry(_on_entry)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        track = self._track
        if track.observers:
            track.account(time.perf_counter())
        track.phase = self.outer
        if self.operation is not None:
            track.last_operation = _PastOperation(self.operation)

    def _tell_entry(self, callback: Callable[[str], None]) -> None:
        if self.outer is not None and self.outer.name == self.name:  # a method of a phase that calls another of it
            return
        try:
            callback(self.name)
        except BaseException:  # a context that does not come about is not left either
            self._track.phase = self.outer
            raise


_on_entry: Callable[[str], None] | None = None


def call_on_entry(callback: Callable[[str], None] | None) -> None:
    """Has whatever thread enters a phase call this with the phase's name, once it is in it; None: nothing any more.

    What it raises comes out of the call that entered the phase. It is for faults that strike on purpose; there is one
    callback in a process.
    """
    global _on_entry
    _on_entry = callback


def in_phase(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator: the function runs in that phase."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with Phase(name):
                return function(*args, **kwargs)

        return within

    return decorate


def end_step(optimizer: Any, num_steps: int) -> None:
    """Notes that an optimizer has ended its step of that number, from 1, and tells the observers."""
    track = _here.track
    track.num_steps = num_steps
    if track.observers:
        track.account(time.perf_counter())
        for observer in track.observers:
            observer.step_ended(optimizer)


def observers() -> tuple[PhaseObserver, ...]:
    """Returns who watches this thread; mostly nobody."""
    return _here.track.observers


@contextmanager
def watch_phases(observer: PhaseObserver) -> Iterator[None]:
    """Tells the observer what this thread does in the block. Blocks may be nested. No communication."""
    track = _here.track
    _account_if_watched(track)
    track.observers = (*track.observers, observer)
    try:
        yield
    finally:
        _account_if_watched(track)
        track.observers = tuple(other for other in track.observers if other is not observer)


def _account_if_watched(track: _Track) -> None:
    """Gives the time so far to those who watch now, so that who comes or goes has its own part alone."""
    if track.observers:
        track.account(time.perf_counter())
    else:
        track.accounted = time.perf_counter()


# Where a thread is.


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationPlace:
    """A communication between ranks.

    Attributes:
        name: Such as "all_reduce".
        number: How many of that name this rank has started among these ranks (and with that peer), from 1.
        ranks: World ranks that take part; none where their group has been destroyed since.
        peer: World rank of the other end of a message; None: all take part alike.
    """

    name: str
    number: int
    ranks: tuple[int, ...]
    peer: int | None = None

    def __str__(self) -> str:
        if self.peer is not None:
            return f"{self.name} number {self.number} {'to' if self.name == 'send' else 'from'} rank {self.peer}"
        of = f"ranks {', '.join(map(str, self.ranks))}" if self.ranks else "a group that is gone"
        return f"{self.name} number {self.number} of {of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentPlace:
    """Where a thread is.

    Attributes:
        num_steps: Steps that ended, of the optimizer that stepped last.
        phases: The phases that it is in, outermost first.
        seconds: How long it has been in the innermost one; 0 outside of all.
        operation: The communication that it is in.
        last_operation: The last one that it came out of.
    """

    num_steps: int = 0
    phases: tuple[str, ...] = ()
    seconds: float = 0.0
    operation: OperationPlace | None = None
    last_operation: OperationPlace | None = None

    def __str__(self) -> str:
        return f"after {self.num_steps} steps, {self.where()}"

    def where(self) -> str:
        """Returns the place in words, without the step."""
        text = "outside of all phases"
        if self.phases:
            text = " ".join(f"in {name}" for name in reversed(self.phases)) + f" for {self.seconds:.1f} s"
        if self.operation is not None:
            return f"{text}, in {self.operation}"
        return text if self.last_operation is None else f"{text}, its last communication {self.last_operation}"


def current_place(thread_id: int | None = None) -> CurrentPlace:
    """Returns where a thread of this process is (None: the calling one). No communication."""
    with _lock:
        track = _tracks.get(threading.get_ident() if thread_id is None else thread_id)
    if track is None:
        return CurrentPlace()
    entered: list[Phase] = []
    innermost = phase = track.phase
    while phase is not None:
        entered.append(phase)
        phase = phase.outer
    operation = next((one.operation for one in entered if one.operation is not None), None)
    return CurrentPlace(
        num_steps=track.num_steps,
        phases=tuple(name for name, _ in groupby(one.name for one in reversed(entered))),
        seconds=0.0 if innermost is None else time.perf_counter() - innermost.since,
        operation=None if operation is None else _place_of(operation, operation.group),
        last_operation=None if track.last_operation is None else track.last_operation.place(),
    )


def _place_of(operation: Communication | _PastOperation, group: dist.ProcessGroup | None) -> OperationPlace:
    return OperationPlace(name=operation.name, number=operation.number, ranks=_ranks_of(group), peer=operation.peer)


def _ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Returns world ranks; none where the group has been destroyed, which the watched thread may do at any moment."""
    try:
        return tuple(dist.get_process_group_ranks(group)) if dist.is_available() else ()
    except (KeyError, ValueError):
        return ()
