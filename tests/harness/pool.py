"""The ranks of one world size, kept alive from job to job and replaced together after a failure.

Every world size has its own ranks, forked from one server: 4 processes share all but 7 MB each, and a group that need
not change its size can stay alive.
"""

from __future__ import annotations

import atexit
import pickle
import shutil
import tempfile
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from harness.failures import RankFailure, RanksFailed
from harness.messages import Job, Reply, Returned, Settle, Settled
from harness.process import RankProcess
from harness.reference import FunctionReference

# How long the other ranks may go on once one has failed: enough for the error of a closed connection to arrive.
_AFTERMATH_SECONDS = 5.0
# How long ranks may take to clean up after a job before they are replaced.
_SETTLE_SECONDS = 5.0

_POOLS: dict[int, RankPool] = {}


class RankPool:
    """Live ranks 0 to `world_size` - 1. After a failed job it is closed and can't be used again.

    Args:
        world_size: number of ranks.
        aftermath_seconds: how long the other ranks may go on once one has failed.
    """

    def __init__(self, world_size: int, aftermath_seconds: float = _AFTERMATH_SECONDS) -> None:
        self.world_size = world_size
        self._aftermath_seconds = aftermath_seconds
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._num_stores = 0
        self._is_group_kept = False
        self._ranks = [RankProcess(rank, world_size, self._directory) for rank in range(world_size)]

    def run(self, function: FunctionReference, arguments: bytes, timeout: float) -> list[Any]:
        """Returns what the function returned, by rank.

        Raises:
            RanksFailed: a rank raised, skipped, died, or was still running after `timeout` seconds.
        """
        job = Job(function=function, arguments=arguments, store_path=self._store_path(), timeout=timeout)
        try:
            results = self._results(self._exchange(job), timeout)
        except BaseException:  # also Ctrl-C: ranks in the middle of a job are of no more use
            self.close()
            raise

    def is_settled(self) -> bool:
        """Returns whether all ranks have cleaned up after a job. Call it once after each."""
        waiting = {rank.connection: rank for rank in self._ranks}
        replies = self._collect(waiting, time.monotonic() + _SETTLE_SECONDS, _SETTLE_SECONDS)
        settled = [reply for reply in replies.values() if isinstance(reply, Settled)]
        self._is_group_kept = all(reply.is_group_reusable for reply in settled)
        return len(settled) == self.world_size

    def close(self) -> None:
        """Ends all ranks and removes their files."""
        for rank in self._ranks:
            rank.kill()  # all before any is waited for: a rank that sees its peers go prints errors
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _store_path(self) -> str | None:
        if self._is_group_kept:
            return None
        self._num_stores += 1
        return str(self._directory / f"store-{self._num_stores}")

    def _exchange(self, job: Job) -> dict[int, Reply]:
        """Sends the job to all ranks and returns their replies, by rank; those that never came are failures, too."""
        self._broadcast(job)
        waiting = {rank.connection: rank for rank in self._ranks}
        replies = self._collect(waiting, time.monotonic() + job.timeout, self._aftermath_seconds)
        for rank in waiting.values():
            replies[rank.rank] = rank.interrogate(job.function.path)
        return replies

    def _broadcast(self, request: Job | Settle) -> None:
        message = pickle.dumps(request)
        for rank in self._ranks:
            rank.send(message)

    def _collect(
        self, waiting: dict[connection.Connection, RankProcess], deadline: float, aftermath_seconds: float
    ) -> dict[int, Reply]:
        """Returns the replies that came in time, by rank, and takes their ranks out of `waiting`."""
        replies: dict[int, Reply] = {}
        while waiting and (ready := connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for answered in ready:
                rank = waiting.pop(answered)
                replies[rank.rank] = rank.receive()
                if isinstance(replies[rank.rank], RankFailure):
                    deadline = min(deadline, time.monotonic() + aftermath_seconds)
        return replies

    def _results(self, replies: dict[int, Reply], timeout: float) -> list[Any]:
        returned = {rank: reply for rank, reply in replies.items() if isinstance(reply, Returned)}
        results = {rank: pickle.loads(reply.result) for rank, reply in returned.items()}
        failures = [reply for reply in replies.values() if isinstance(reply, RankFailure)]
        if failures:
            raise RanksFailed(failures, results, self.world_size, f"{timeout:g}")
        return [results[rank] for rank in range(self.world_size)]


def run_on_live_ranks(world_size: int, function: FunctionReference, arguments: bytes, timeout: float) -> list[Any]:
    """Runs the function on the live ranks of that world size, starting them where there are none."""
    pool = _POOLS.pop(world_size, None)  # goes back after success: a pool whose job failed is closed
    if pool is None or not pool.is_settled():
        if pool is not None:
            pool.close()
        pool = RankPool(world_size)
    results = pool.run(function, arguments, timeout)
    _POOLS[world_size] = pool
    return results


def run_on_fresh_ranks(world_size: int, function: FunctionReference, arguments: bytes, timeout: float) -> list[Any]:
    """Runs the function on new ranks that end with it.

    Such jobs are often about what the others do when one dies: those may go on until the timeout.
    """
    pool = RankPool(world_size, aftermath_seconds=timeout)
    results = pool.run(function, arguments, timeout)
    pool.close()
    return results


@atexit.register
def close_pools() -> None:
    """Ends all live ranks; the next job starts new ones."""
    while _POOLS:
        _, pool = _POOLS.popitem()
        pool.is_settled()  # a rank that is ended while others clean up with it makes them print errors
        pool.close()
