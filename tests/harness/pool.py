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
from harness.forkserver import Device
from harness.messages import Job, Join, Reply, Request, Returned, Settle, Settled
from harness.process import RankProcess
from harness.reference import FunctionReference

# How long the other ranks may go on once one has failed: enough for the error of a closed connection to arrive.
_AFTERMATH_SECONDS = 5.0
# How long new processes may take to start and to meet, on a busy machine.
_START_SECONDS = 60.0
# How long ranks may take to clean up after a job before they are replaced.
_SETTLE_SECONDS = 5.0

_POOLS: dict[tuple[int, Device], RankPool] = {}


class RankPool:
    """Live ranks 0 to `world_size` - 1. After a failed job it is closed and can't be used again.

    Args:
        world_size: number of ranks.
        aftermath_seconds: how long the other ranks may go on once one has failed.
        device: the ranks' device.
    """

    def __init__(self, world_size: int, aftermath_seconds: float = _AFTERMATH_SECONDS, device: Device = "cpu") -> None:
        self.world_size = world_size
        self._aftermath_seconds = aftermath_seconds
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._num_stores = 0
        self._is_group_kept = False
        self._ranks = [RankProcess(rank, world_size, self._directory, device) for rank in range(world_size)]

    def run(self, function: FunctionReference, arguments: bytes, timeout: float) -> list[Any]:
        """Returns what the function returned, by rank.

        Raises:
            RanksFailed: a rank raised, skipped, died, or was still running after `timeout` seconds.
        """
        __tracebackhide__ = True
        job = Job(function=function, arguments=arguments, timeout=timeout)
        try:
            if not self._is_group_kept:
                self._num_stores += 1
                self._exchange(Join(store_path=str(self._directory / f"store-{self._num_stores}")), _START_SECONDS)
            results = _results(self._exchange(job, timeout, function.path))
        except BaseException:  # also Ctrl-C: ranks in the middle of a job are of no more use
            self.close()
            raise
        self._broadcast(Settle())
        return [results[rank] for rank in range(self.world_size)]

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

    def _exchange(self, request: Join | Job, timeout: float, test_path: str | None = None) -> dict[int, Reply]:
        """Returns the answers to a request, by rank.

        Raises:
            RanksFailed: not all ranks did as they were asked. Those that did not answer in time were ended.
        """
        __tracebackhide__ = True
        self._broadcast(request)
        waiting = {rank.connection: rank for rank in self._ranks}
        replies = self._collect(waiting, time.monotonic() + timeout, self._aftermath_seconds)
        for rank in waiting.values():
            rank.interrupt()  # all at once: a rank that sees its peers go is no longer where it hung
        for rank in waiting.values():
            replies[rank.rank] = rank.failure(test_path)
        failures = [reply for reply in replies.values() if isinstance(reply, RankFailure)]
        if failures:
            raise RanksFailed(failures, _results(replies), self.world_size, f"{timeout:g}")
        return replies

    def _broadcast(self, request: Request) -> None:
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


def _results(replies: dict[int, Reply]) -> dict[int, Any]:
    return {rank: pickle.loads(reply.result) for rank, reply in replies.items() if isinstance(reply, Returned)}


def run_on_live_ranks(
    world_size: int, function: FunctionReference, arguments: bytes, timeout: float, device: Device = "cpu"
) -> list[Any]:
    """Runs the function on the live ranks of that world size and device, starting them where there are none."""
    __tracebackhide__ = True
    pool = _POOLS.pop((world_size, device), None)  # goes back after success: a pool whose job failed is closed
    if pool is None or not pool.is_settled():
        if pool is not None:
            pool.close()
        pool = RankPool(world_size, device=device)
    results = pool.run(function, arguments, timeout)
    _POOLS[world_size, device] = pool
    return results


def run_on_fresh_ranks(
    world_size: int, function: FunctionReference, arguments: bytes, timeout: float, device: Device = "cpu"
) -> list[Any]:
    """Runs the function on new ranks that end with it.

    Such jobs are often about what the others do when one dies: those may go on until the timeout.
    """
    __tracebackhide__ = True
    pool = RankPool(world_size, aftermath_seconds=timeout, device=device)
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
