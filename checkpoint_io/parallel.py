"""Actions on all ranks of a checkpoint call or in threads; the first failure is raised on all ranks, in the caller."""

from __future__ import annotations

import socket
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

from booster.comm import (
    SharedBlocks,
    all_gather_bytes,
    fake,
    group_rank,
    group_size,
    raise_on_all_ranks,
    share_blocks,
)
from booster.errors import BoosterError, CheckpointError

T = TypeVar("T")
Job = TypeVar("Job")


class CheckpointGroup:
    """Process group of one checkpoint call.

    Args:
        group: Process group. Optional, defaults to the world, or to this process alone if torch.distributed is not
            initialized.
        host: Host name of this rank. Optional, defaults to the system's.

    Attributes:
        group: Process group as given.
        host: Identifier that is equal only for ranks on the same machine.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, host: str | None = None) -> None:
        self.group = group
        self.host = f"{socket.gethostname()}/{uuid.getnode():x}" if host is None else host
        self._hosts: list[str] = []
        self._shared_blocks: dict[tuple[int, int], SharedBlocks | None] = {}

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return group_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return group_size(self.group)

    def hosts(self) -> list[str]:
        """Return the host of every rank. Collective at its first call."""
        if not self._hosts:
            payloads, of_rank = all_gather_bytes(self.host.encode(), self.group)
            self._hosts = [payloads[index].decode() for index in of_rank]
        return self._hosts

    def ranks_of_this_host(self) -> list[int]:
        """Return the ranks on this rank's host, this one among them. Collective at the first call of `hosts`."""
        hosts = self.hosts()
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def share_blocks(self, num_blocks: int, block_bytes: int) -> SharedBlocks | None:
        """Return blocks of memory that the ranks of this host share; see `booster.comm.share_blocks`.

        All reads of a checkpoint call use the same ones. Collective at the first call with these numbers.
        """
        key = num_blocks, block_bytes
        if key not in self._shared_blocks:
            self._shared_blocks[key] = share_blocks(num_blocks, block_bytes, self.ranks_of_this_host(), self.group)
        return self._shared_blocks[key]

    def run_on_all_ranks(self, action: Callable[[], T], action_name: str) -> T:
        """Run `action` and return its result if it succeeds on every rank; else raise on every rank. Collective.

        Args:
            action: Function to run. It must not call collectives, except as its first step and if any failure of that
                step occurs on all ranks.
            action_name: Description of the operation for messages.
        """
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(action())
        except Exception as error:  # raised below on every rank
            failure = as_checkpoint_error(error, action_name)
        if self.size > 1:
            raise_on_all_ranks(failure, self.group)
        elif failure is not None:
            raise failure
        return results[0]


def as_checkpoint_error(error: Exception, action_name: str) -> Exception:
    """Wrap an OSError with a description of the operation; return other errors unchanged."""
    if isinstance(error, BoosterError) or not isinstance(error, OSError):
        return error
    failure = CheckpointError(f"{action_name} failed: {error}. Check the path, its permissions and the free space")
    failure.__cause__ = error
    return failure


def batches_by_bytes(items: Iterable[Job], num_bytes_of: Callable[[Job], int], batch_bytes: int) -> Iterator[list[Job]]:
    """Yield the items in lists of about as many bytes, as jobs of threads."""
    batch: list[Job] = []
    free_bytes = batch_bytes
    for item in items:
        batch.append(item)
        free_bytes -= num_bytes_of(item)
        if free_bytes <= 0:
            yield batch
            batch, free_bytes = [], batch_bytes
    if batch:
        yield batch


def run_in_threads(work: Callable[[Job], None], jobs: Iterable[Job], num_threads: int) -> None:
    """Run all jobs, in any order, and return when all threads have ended.

    Args:
        work: Function that runs one job.
        jobs: Jobs.
        num_threads: Number of threads, including the calling one.

    Raises:
        BaseException: Exception of the first job that failed. No job starts after that.
    """
    if fake.replicas is not None and num_threads > 1:
        with fake.as_threads(num_threads):
            run_in_threads(work, jobs, 1)
        return
    if num_threads <= 1:
        for job in jobs:
            work(job)
        return
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
