"""Runs jobs in a few threads; the first failure stops all of them and is raised where they were asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["run_in_threads"]

Job = TypeVar("Job")


def run_in_threads(work: Callable[[Job], None], jobs: Iterable[Job], num_threads: int) -> None:
    """Return when every job is done, in any order, and no thread is left.

    Args:
        work: Does one job.
        jobs: What there is to do; iterated under a lock.
        num_threads: How many jobs at once, the calling thread's included.

    Raises:
        BaseException: What the first job that failed raised. No other was begun after that.
    """
    queue = _Queue(jobs)

    def loop() -> None:
        try:
            for job in queue:
                work(job)
        except BaseException as error:  # raised below, whichever thread this is
            queue.stop(error)

    threads: list[threading.Thread] = []
    try:
        for number in range(1, num_threads):
            thread = threading.Thread(target=loop, name=f"booster-checkpoint-{number}")
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending and starts none: the calling thread does it all
                break
            threads.append(thread)
        loop()
    except BaseException as error:  # an interrupt between two threads' starts
        queue.stop(error)
    for thread in threads:
        _join(thread, queue)
    if queue.failure is not None:
        raise queue.failure


def _join(thread: threading.Thread, queue: _Queue[Job]) -> None:
    # An interrupt must not leave a thread behind: it would go on writing into files that the caller closes.
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as error:  # raised when all threads have ended
            queue.stop(error)


class _Queue(Generic[Job]):
    """Jobs that several threads take one by one, until there are none or one of them failed."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._lock = threading.Lock()
        self.failure: BaseException | None = None

    def stop(self, failure: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = failure

    def __iter__(self) -> Iterator[Job]:
        while True:
            with self._lock:
                if self.failure is not None:
                    return
                try:
                    job = next(self._jobs)
                except StopIteration:
                    return
            yield job
