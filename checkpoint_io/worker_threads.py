"""Runs jobs in threads; the first failure stops all threads and is raised in the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Job = TypeVar("Job")


def run_in_threads(work: Callable[[Job], None], jobs: Iterable[Job], num_threads: int) -> None:
    """Run all jobs, in any order, and return when all threads have ended.

    Args:
        work: Function that runs one job.
        jobs: Jobs; iterated under a lock.
        num_threads: Number of threads, including the calling one.

    Raises:
        BaseException: Exception of the first job that failed. No job starts after that.
    """
    queue = _Queue(jobs)

    def loop() -> None:
        try:
            for job in queue:
                work(job)
        except BaseException as error:  # raised below, in the calling thread
            queue.stop(error)

    threads: list[threading.Thread] = []
    try:
        for number in range(1, num_threads):
            thread = threading.Thread(target=loop, name=f"booster-checkpoint-{number}")
            try:
                thread.start()
            except RuntimeError:  # no new threads at interpreter exit: the calling thread runs all jobs
                break
            threads.append(thread)
        loop()
    except BaseException as error:  # KeyboardInterrupt while threads are started
        queue.stop(error)
    # An interrupt must not leave a thread behind, which would continue to write into files that the caller closes.
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # raised after all threads have ended
                queue.stop(error)
    if queue.failure is not None:
        raise queue.failure


class _Queue(Generic[Job]):
    """Thread-safe iterator over jobs that stops at the first failure."""

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
