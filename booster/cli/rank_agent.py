"""torch's elastic agent, extended by the cause of each rank's exit, resumption of stopped ranks, and restart lines."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.launcher import api

from booster.cli.agreed_rendezvous import RestartCount
from booster.cli.failure import Failure, RankFailure, has_error_report, report_time, restart_line
from booster.cli.last_signs import describe_last_heartbeats

__all__ = ["ExitRecords", "record_exits"]

# Note [Exit cause]
# When a rank fails, torch's agent sends SIGTERM to all others, and SIGKILL after 30 s. Exit codes do not show the
# sender: a rank killed by the system looks like one killed by the agent. So this agent records which ranks have exited
# immediately before it sends signals. A rank stopped by SIGSTOP or a debugger does not handle SIGTERM, so it is sent
# SIGCONT first. Killed ranks leave no error report, so the agent reads the last heartbeats from their store.


@dataclass(slots=True)
class ExitRecords:
    """Exit records of this node's ranks that torch does not keep.

    Attributes:
        host: Name of the node; "" for a single node.
        attempt: Restart count of the job, where torch's own may differ between nodes.
        gone: Processes that had exited before the launcher terminated the others; None if it terminated none.
        stopped: Processes that were stopped at that time.
        seen_ns: Time of that check, by this machine's clock.
        signs: Description of the ranks' last heartbeats, if they were read.
    """

    host: str = ""
    restart_count: RestartCount = field(default_factory=RestartCount)
    exited: frozenset[int] | None = None
    stopped: frozenset[int] = frozenset()
    checked_ns: int = 0
    last_heartbeats: str = ""

    def with_exit_causes(self, failures: Mapping[int, Failure]) -> dict[int, RankFailure]:
        """Return torch's failures with their exit causes, see Note [Exit cause]."""
        return {rank: self._with_exit_cause(failure) for rank, failure in failures.items()}

    def _with_exit_cause(self, failure: Failure) -> RankFailure:
        by_launcher = None
        if self.exited is not None:
            # A rank that had written its error report was about to exit by itself.
            by_launcher = failure.pid not in self.exited and report_time(failure) > self.checked_ns
        return RankFailure(
            host=self.host,
            local_rank=failure.local_rank,
            pid=failure.pid,
            exitcode=failure.exitcode,
            error_file_data=failure.error_file_data,
            by_launcher=by_launcher,
            was_stopped=failure.pid in self.stopped,
        )


@contextmanager
def record_exits(records: ExitRecords) -> Iterator[None]:
    """Make torch's launcher use an agent that fills in `records`."""
    launcher: Any = api  # elastic_launch reads the agent class from this module
    original = launcher.LocalElasticAgent
    launcher.LocalElasticAgent = partial(_ElasticAgent, records)
    try:
        yield
    finally:
        launcher.LocalElasticAgent = original


class _ElasticAgent(LocalElasticAgent):
    def __init__(self, records: ExitRecords, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._records = records
        self._failures: dict[int, RankFailure] = {}
        self._processes: frozenset[int] = frozenset()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._records.exited, self._records.stopped, self._records.last_heartbeats = None, frozenset(), ""
        self._failures = {}
        started: dict[int, Any] = super()._start_workers(worker_group)
        if self._pcontext is not None:
            self._processes = frozenset(self._pcontext.pids().values())
            self._pcontext.close = partial(self._close, self._pcontext, self._pcontext.close)  # type: ignore[method-assign]
        return started

    def _close(self, context: PContext, close: Any, *arguments: Any, **settings: Any) -> None:
        processes = context.pids().values()
        if self._records.exited is None:
            self._records.exited = frozenset(process for process in processes if _has_exited(process))
            self._records.checked_ns = time.time_ns()
        stopped = frozenset(process for process in processes if _is_stopped(process))
        self._records.stopped |= stopped
        for process in stopped:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGCONT)  # torch makes each rank a process group leader
        close(*arguments, **settings)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            _kill_orphans(self._processes)
            self._failures = self._records.with_exit_causes(result.failures)
            if self._failures and self._remaining_restarts == 0 and not has_error_report(self._failures):
                self._records.last_heartbeats = self._last_heartbeats(worker_group)
        return result

    def _last_heartbeats(self, worker_group: WorkerGroup) -> str:
        local_count = worker_group.spec.max_restarts - self._remaining_restarts
        restart_count = self._records.restart_count.value
        return describe_last_heartbeats(
            str(worker_group.master_addr),
            int(worker_group.master_port or 0),
            _world_size(worker_group),
            local_count if restart_count is None else restart_count,
            reference_time=self._records.checked_ns / 1e9,
        )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._failures:  # else another node failed, joined or left
            max_restarts = worker_group.spec.max_restarts
            line = restart_line(
                self._failures, _world_size(worker_group), max_restarts - self._remaining_restarts, max_restarts
            )
            print(line, file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)


def _kill_orphans(ranks: frozenset[int]) -> None:
    """Kill orphans of ranks, such as the data loader workers of a killed rank."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):  # it has exited, or is another user's
            group = os.getpgid(process.pid)
            if group in ranks and process.pid != group:
                os.kill(process.pid, signal.SIGKILL)


def _world_size(worker_group: WorkerGroup) -> int:
    return int(worker_group.workers[0].world_size)


def _has_exited(process_id: int) -> bool:
    return _status(process_id) in (None, psutil.STATUS_ZOMBIE)


def _is_stopped(process_id: int) -> bool:
    return bool(_status(process_id) == psutil.STATUS_STOPPED)


def _status(process_id: int) -> str | None:
    try:
        return str(psutil.Process(process_id).status())
    except psutil.NoSuchProcess:
        return None
