"""Operations through shared memory: started now, performed later, by all ranks in the order in which they started them.

Note [Started operations]
Through shared memory nothing moves by itself: a rank has to copy. So an operation that is started is only noted, and
performed when something waits for it. All ranks must then perform the same ones in the same order, though they may wait
in different orders: ranks that use different parts of a model do. So whoever waits first performs everything that its
thread has started before, on any group; and so does whoever waits for anything else in this package, as a rank may need
what this one has only started to come to where this one waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from booster.comm.operation import Operation
    from booster.comm.shared_memory import GroupMemory

__all__ = ["Started", "perform_started"]


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.operations: deque[Started] = deque()


_mine = _OfThisThread()


class Started:
    """An operation that takes its turn.

    Args:
        home: The group's memory.
        operation: Which one it is.
        perform: What it does; called once, and again where it raised. After an error of shared memory everything later
            fails by itself.
    """

    def __init__(self, home: GroupMemory, operation: Operation, perform: Callable[[], None]) -> None:
        self._home = home
        self._operation = operation
        self._perform: Callable[[], None] | None = perform
        self._is_queued = True
        with home.lock:
            home.started.append(self)
        _mine.operations.append(self)

    @property
    def lock(self) -> threading.RLock:
        """Held while it is performed."""
        return self._home.lock

    @property
    def is_performed(self) -> bool:
        """Whether its turn has been."""
        return self._perform is None

    def finish(self) -> None:
        """Performs what was started before it, and then itself; returns at once if that was done already.

        Raises:
            RankFailedError: A rank is lost or too late, in this operation or one before it.
        """
        if not self.is_performed:
            perform_started(self)
            self._take_turns()

    def _take_turns(self) -> None:
        with self._home.lock:
            while self._is_queued:
                self._home.started.popleft()._run()
            if not self.is_performed:
                self._run()  # it has failed, and does so again

    def _run(self) -> None:
        self._is_queued = False
        if self._perform is not None:
            with self._operation.failures_named():
                self._perform()
            self._perform = None  # lets go of its tensors


def perform_started(last: Started | None = None) -> None:
    """Performs what this thread has started, up to an operation (None: everything).

    Raises:
        RankFailedError: A rank is lost or too late.
    """
    mine = _mine.operations
    while mine and (last is None or not last.is_performed):
        mine.popleft()._take_turns()
