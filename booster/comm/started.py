"""Pending work: collectives through shared memory that are started now and run at a later wait, in starting order.

Shared memory moves nothing by itself: a rank has to copy. So a started operation is only queued, and runs when
something waits for it. All ranks must then run the same operations in the same order, though they may wait in different
orders: ranks that use different modules of a model do. So a wait first runs everything that its thread has started
before, on any group. So does a wait for anything else in this package: another rank may need this rank's pending work
to reach the point that this rank waits for.
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
    """Queued operation.

    Args:
        home: Shared memory of the group.
        operation: Operation that runs.
        perform: Implementation, called once, and again if it raised. After an error of shared memory every later call
            fails.
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
        """Lock that is held while it runs."""
        return self._home.lock

    @property
    def is_performed(self) -> bool:
        """Whether it has run."""
        return self._perform is None

    def finish(self) -> None:
        """Run everything that was started before it, and then itself; return at once if it has run.

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
                self._run()  # it has failed, and fails again

    def _run(self) -> None:
        self._is_queued = False
        if self._perform is not None:
            with self._operation.failures_named():
                self._perform()
            self._perform = None  # frees its tensors


def perform_started(last: Started | None = None) -> None:
    """Run this thread's pending work, up to an operation, by default all.

    Raises:
        RankFailedError: A rank is lost or too late.
    """
    mine = _mine.operations
    while mine and (last is None or not last.is_performed):
        mine.popleft()._take_turns()
