"""Asynchronous saves: one background thread, saves in call order, failures raised later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from booster.checkpoint_io.ranks import CheckpointGroup
from booster.checkpoint_io.saving.async_staging import Arena
from booster.comm import raise_on_all_ranks
from booster.errors import CheckpointError
from booster.logger import get_dist_logger

__all__ = ["AsyncSaves"]

# Note [Staging]
# A save in flight owns the host memory that its tensors were copied into (its arena). Two arenas let a model save and
# an optimizer save follow each other without waiting. A third save waits for the first one's arena, which bounds the
# memory. Arenas are reused, because touching fresh memory costs far more than the copy itself.
_MAX_ARENAS = 2


class AsyncSaves:
    """Background saves of one process group.

    The thread runs while there are saves to write. It is not a daemon: the process does not exit before its saves end.

    Args:
        ranks: Ranks that save together.
    """

    def __init__(self, ranks: CheckpointGroup) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], Arena, str]] = deque()
        self._thread: threading.Thread | None = None
        self._free: list[Arena] = []
        self._num_arenas = 0
        self._failures: list[BaseException] = []

    def start(self, stage: Callable[[Arena], Callable[[], None]], action: str) -> None:
        """Stage what is to be written and return; the write runs in the background, after all previous saves.

        Args:
            stage: Copies into the arena and returns the background job.
            action: Description of the operation for messages.
        """
        arena = self._acquire_arena()
        try:
            job = self._ranks.run_on_all_ranks(lambda: stage(arena), action)
        except BaseException:
            self._release_arena(arena)
            raise
        with self._changed:
            self._jobs.append((job, arena, action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_jobs, name="booster-async-save", daemon=False)
                self._thread.start()

    def raise_failures(self) -> None:
        """Raise on every rank if a background save failed on any rank. Collective.

        A rank whose own save is still in flight waits for it before it raises.
        """
        with self._changed:
            is_unused = self._num_arenas == 0
            failed = bool(self._failures)
        if is_unused:  # equal on every rank: saves are collective
            return
        try:
            raise_on_all_ranks(
                CheckpointError("a save in the background failed") if failed else None, self._ranks.group
            )
        except CheckpointError:
            self._wait_until_idle()
            self._raise_first()
            raise

    def wait(self) -> None:
        """Wait until every save is on disk. Collective.

        Raises:
            CheckpointError: A save failed.
        """
        self._wait_until_idle()
        self.raise_failures()

    def _raise_first(self) -> None:
        with self._changed:
            failures, self._failures = self._failures, []
        if failures:
            raise CheckpointError(f"a save in the background failed: {failures[0]}") from failures[0]

    def _wait_until_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _acquire_arena(self) -> Arena:
        with self._changed:
            if not self._free and self._num_arenas < _MAX_ARENAS:
                self._num_arenas += 1
                return Arena()
            self._changed.wait_for(lambda: bool(self._free))
            return self._free.pop(0)  # FIFO: with alternating saves, each reuses an arena of its own size

    def _release_arena(self, arena: Arena) -> None:
        arena.reset()
        with self._changed:
            self._free.append(arena)
            self._changed.notify_all()

    def _run_jobs(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job, arena, action = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # raised by the caller's next checkpoint call; later saves must still run
                get_dist_logger().error(f"{action} in the background failed: {error}")
                with self._changed:
                    self._failures.append(error)
            finally:
                self._release_arena(arena)
