"""Runs jobs in threads; the first failure stops all threads and is raised in the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")


def run_in_threads(work: Callable[[Job], None], jobs: Iterable[Job], num_threads: int) -> None:
    """Run all jobs, in any order, and return when all threads have ended.

    Args:
        work: Function that runs one job.
        jobs: Jobs.
        num_threads: Number of threads, including the calling one.

    Raises:
        BaseException: Exception of the first job that failed. No job starts after that.
    """
    remaining = deque(jobs)  # its methods are thread-safe
    failures: list[BaseException] = []

    def stop(error: BaseException) -> None:
        failures.append(error)
        remaining.clear()

    def run_remaining() -> None:
        try:
            while True:
                try:
                    job = remaining.popleft()
                except IndexError:
                    return
                work(job)
        except BaseException as error:  # raised below, in the calling thread
            stop(error)

    # The calling thread works too, so that all jobs run where no thread can be started: at interpreter exit.
    pool = ThreadPoolExecutor(max(1, num_threads - 1), thread_name_prefix="booster-checkpoint")
    try:
        for _ in range(num_threads - 1):
            pool.submit(run_remaining)
    except RuntimeError:
        pass
    except BaseException as error:  # KeyboardInterrupt while threads are started
        stop(error)
    run_remaining()
    # An interrupt must not leave a thread behind, which would continue to write into files that the caller closes.
    is_shut_down = False
    while not is_shut_down:
        try:
            pool.shutdown()
            is_shut_down = True
        except BaseException as error:  # raised after all threads have ended
            stop(error)
    if failures:
        raise failures[0]
