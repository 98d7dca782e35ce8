"""Progress of this rank: its step, the phase of its training loop, and its current collective."""

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
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import torch.distributed as dist

# Note [Phases]
# The functions of a training loop enter phases: "boost", "data", "forward", "evaluate" (a forward in evaluation mode
# without gradients), "backward", "clip", "step", "pipeline", "save", "load". A save has the sub-phases "save plan",
# "save write" and "commit", in the thread that runs them. The innermost phase may be "communication", with its
# operation. Phases nest. Each thread has its own stack of phases, which other threads may read: the thread that detects
# a hang is not the one that hangs. Entering and leaving is always recorded, for errors about lost ranks, and costs half
# a microsecond; more is done only for threads with observers. Time is attributed to the innermost phase, so the times
# of all phases and the time outside of them add up to the wall-clock time.

P = ParamSpec("P")
R = TypeVar("R")

SAVE_PHASES = ("save plan", "save write", "commit")

# All phases but "communication", whose operations have their own names.
_TRAINING_PHASES = ("boost", "data", "forward", "evaluate", "backward", "clip", "step", "pipeline")
PHASES = (*_TRAINING_PHASES, "save", *SAVE_PHASES, "load")


class Communication(Protocol):
    """Attributes of an operation that a phase records; see `booster.comm.collective_op.CollectiveOp`."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def number(self) -> int: ...

    @property
    def peer(self) -> int | None: ...


class StepCallback:
    """Callbacks of a thread's training loop. The defaults do nothing."""

    def on_time(self, name: str | None, seconds: float) -> None:
        """Time was spent in a phase as the innermost one, or outside of all phases (`name` is None)."""

    def on_forward(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A boosted model starts a training forward."""

    def on_loss(self, optimizer: Any, loss: Any, num_items: float | None) -> None:
        """An optimizer starts the backward of a loss: a mean, or a sum over `num_items`."""

    def on_remote_loss(self, optimizer: Any) -> None:
        """An optimizer finished the backward of a loss that another pipeline stage holds."""

    def on_gradients(self, optimizer: Any, named: Callable[[], Iterator[tuple[str, Any]]]) -> None:
        """An optimizer has the gradients of its next step; `named` yields this rank's, by the user's names."""

    def on_step_end(self, optimizer: Any) -> None:
        """An optimizer has stepped, or skipped its step."""


class _FinishedCollective:
    """Finished operation. Holds no reference to its group, which owns memory and connections."""

    __slots__ = ("_group", "name", "number", "peer")

    def __init__(self, operation: Communication) -> None:
        self.name, self.number, self.peer = operation.name, operation.number, operation.peer
        self._group = None if operation.group is None else weakref.ref(operation.group)

    def info(self) -> CollectiveInfo | None:
        """Return its description, or None if its group is gone."""
        group = None if self._group is None else self._group()
        return None if group is None and self._group is not None else _info_of(self, group)


# A phase that was entered: its name, its operation, when, and the phase around it. Not an object, to be cheap.
_Entered: TypeAlias = "tuple[str, Communication | None, float, _Entered | None]"


class _ThreadState:
    """Phases, steps and observers of one thread."""

    __slots__ = ("__weakref__", "attributed_until", "last_operation", "num_steps", "observers", "phase")

    def __init__(self) -> None:
        self.phase: _Entered | None = None
        self.last_operation: _FinishedCollective | None = None
        self.num_steps = 0
        self.observers: tuple[StepCallback, ...] = ()
        self.attributed_until = 0.0

    def attribute_time(self, now: float) -> None:
        """Attribute the time since the last call to the innermost phase."""
        name = None if self.phase is None else self.phase[0]
        seconds, self.attributed_until = now - self.attributed_until, now
        for observer in self.observers:
            observer.on_time(name, seconds)


class _CurrentThread(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()
        with _lock:
            _threads[threading.get_ident()] = self.state


_lock = threading.Lock()
_threads: WeakValueDictionary[int, _ThreadState] = WeakValueDictionary()  # freed with the thread
current_thread = _CurrentThread()  # read by what notifies observers, as a function would cost a call per step


class Phase:
    """Context of a phase; see Note [Phases].

    Args:
        name: Name of the phase.
        operation: Operation of a "communication" phase.
    """

    __slots__ = ("_outer", "_thread", "name", "operation")

    def __init__(self, name: str, operation: Communication | None = None) -> None:
        self.name = name
        self.operation = operation

    def __enter__(self) -> Phase:
        self._thread = state = current_thread.state
        now = time.perf_counter()
        if state.observers:
            state.attribute_time(now)
        self._outer = outer = state.phase
        state.phase = (self.name, self.operation, now, outer)
        if _on_entry is not None and (outer is None or outer[0] != self.name):  # one method of a phase calls another
            try:
                _on_entry(self.name)
            except BaseException:  # __exit__ is not called for a context whose __enter__ raised
                state.phase = outer
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state = self._thread
        if state.observers:
            state.attribute_time(time.perf_counter())
        state.phase = self._outer
        if self.operation is not None:
            state.last_operation = _FinishedCollective(self.operation)


def is_in_phase(name: str) -> bool:
    """Return whether this thread is in a phase, as the innermost one or around it."""
    return any(entered[0] == name for entered in _entered_phases(current_thread.state))


def is_any_thread_in_phase(*names: str) -> bool:
    """Return whether any thread of this process is in one of the phases; hooks of autograd run in its own threads."""
    with _lock:
        states = list(_threads.values())
    return any(entered[0] in names for state in states for entered in _entered_phases(state))


def _entered_phases(state: _ThreadState) -> Iterator[_Entered]:
    """Yield the current phases of a thread, the innermost first."""
    phase = state.phase
    while phase is not None:
        yield phase
        phase = phase[3]


_on_entry: Callable[[str], None] | None = None


def call_on_entry(callback: Callable[[str], None] | None) -> None:
    """Set the function that every thread calls with the name of a phase that it enters, or None.

    Its errors propagate from the call that entered the phase. For fault injection; a process has one callback.
    """
    global _on_entry
    _on_entry = callback


def in_phase(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: run the function in a phase."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            state = current_thread.state
            if state.observers or _on_entry is not None:
                with Phase(name):
                    return function(*args, **kwargs)
            outer = state.phase  # what `Phase` does without observers, at a quarter of its calls
            state.phase = (name, None, time.perf_counter(), outer)
            try:
                return function(*args, **kwargs)
            finally:
                state.phase = outer

        return within

    return decorate


def end_step(optimizer: Any, num_steps: int) -> None:
    """Record that an optimizer finished step `num_steps` (from 1), and notify the observers."""
    state = current_thread.state
    state.num_steps = num_steps
    if state.observers:
        state.attribute_time(time.perf_counter())
        for observer in state.observers:
            observer.on_step_end(optimizer)


@contextmanager
def observe_phases(observer: StepCallback) -> Iterator[None]:
    """Notify the observer of this thread's phases in the block. Blocks may be nested. No communication."""
    state = current_thread.state
    # The time so far belongs to the observers so far, also before one is removed.
    state.attribute_time(time.perf_counter())
    state.observers = (*state.observers, observer)
    try:
        yield
    finally:
        state.attribute_time(time.perf_counter())
        state.observers = tuple(other for other in state.observers if other is not observer)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveInfo:
    """Description of a collective or message.

    Attributes:
        name: Name of the operation, such as "all_reduce".
        number: Sequence number among this rank's operations of that name in the group (and with that peer), from 1.
        ranks: Global ranks of the group; empty if the group has been destroyed since.
        peer: Global rank of the other end of a message, None for collectives.
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
class Progress:
    """Progress of a thread.

    Attributes:
        num_steps: Finished steps of the optimizer that stepped last.
        phases: Current phases, outermost first.
        seconds: Time in the innermost phase; 0 outside of all.
        operation: Current operation.
        last_operation: Last finished operation.
    """

    num_steps: int = 0
    phases: tuple[str, ...] = ()
    seconds: float = 0.0
    operation: CollectiveInfo | None = None
    last_operation: CollectiveInfo | None = None

    def __str__(self) -> str:
        return f"after {self.num_steps} steps, {self.describe()}"

    def describe(self) -> str:
        """Return the progress as text, without the step."""
        text = "outside of all phases"
        if self.phases:
            text = " ".join(f"in {name}" for name in reversed(self.phases)) + f" for {self.seconds:.1f} s"
        if self.operation is not None:
            return f"{text}, in {self.operation}"
        return text if self.last_operation is None else f"{text}, its last communication {self.last_operation}"


def current_progress(thread_id: int | None = None) -> Progress:
    """Return the progress of a thread of this process, by default the calling one. No communication."""
    with _lock:
        state = _threads.get(threading.get_ident() if thread_id is None else thread_id)
    if state is None:
        return Progress()
    entered = list(_entered_phases(state))
    operation = next((one for _, one, _, _ in entered if one is not None), None)
    return Progress(
        num_steps=state.num_steps,
        phases=tuple(name for name, _ in groupby(name for name, *_ in reversed(entered))),
        seconds=time.perf_counter() - entered[0][2] if entered else 0.0,
        operation=None if operation is None else _info_of(operation, operation.group),
        last_operation=None if state.last_operation is None else state.last_operation.info(),
    )


def _info_of(operation: Communication | _FinishedCollective, group: dist.ProcessGroup | None) -> CollectiveInfo:
    try:
        ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_available() else ()
    except (KeyError, ValueError):  # the observed thread may destroy the group at any moment
        ranks = ()
    return CollectiveInfo(name=operation.name, number=operation.number, ranks=ranks, peer=operation.peer)
