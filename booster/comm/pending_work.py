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
from contextlib import AbstractContextManager
from typing import Protocol


class GroupQueue(Protocol):
    """Pending work of a group on this rank, and the lock that is held while it runs."""

    lock: threading.RLock
    pending: deque[PendingWork]


class _ThreadPending(threading.local):
    def __init__(self) -> None:
        self.operations: deque[PendingWork] = deque()


_pending = _ThreadPending()


class PendingWork:
    """Queued operation.

    Args:
        queue: Queue of the group.
        error_context: Context in which the work runs: translates its errors.
        function: Implementation, called once, and again if it raised. After an error of shared memory every later call
            fails.

    Attributes:
        lock: Lock that is held while it runs.
        is_done: Whether it has run.
    """

    def __init__(
        self,
        queue: GroupQueue,
        error_context: Callable[[], AbstractContextManager[None]],
        function: Callable[[], None],
    ) -> None:
        self._queue = queue
        self.lock = queue.lock
        self.is_done = False
        self._error_context = error_context
        self._function: Callable[[], None] | None = function
        self._is_queued = True
        with self.lock:
            queue.pending.append(self)
        _pending.operations.append(self)

    def wait(self) -> None:
        """Run everything that was started before it, and then itself; return at once if it has run."""
        if not self.is_done:
            flush_pending(self)
            self._run_in_order()

    def _run_in_order(self) -> None:
        with self.lock:
            while self._is_queued:
                self._queue.pending.popleft()._run()
            if not self.is_done:
                self._run()  # it has failed, and fails again

    def _run(self) -> None:
        self._is_queued = False
        if self._function is not None:
            with self._error_context():
                self._function()
            self._function = None  # frees its tensors
            self.is_done = True


def flush_pending(last: PendingWork | None = None) -> None:
    """Run this thread's pending work, up to an operation, by default all."""
    pending = _pending.operations
    while pending and (last is None or not last.is_done):
        pending.popleft()._run_in_order()
