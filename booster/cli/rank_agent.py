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

from booster.cli.agreed_rendezvous import Attempt
from booster.cli.failure import Failure, RankFailure, has_left_word, restart_line, time_of_word
from booster.cli.last_signs import where_ranks_were

__all__ = ["RankNotes", "ranks_noted"]

# Note [Exit cause]
# When a rank fails, torch's agent sends SIGTERM to all others, and SIGKILL after 30 s. Exit codes do not show the
# sender: a rank killed by the system looks like one killed by the agent. So this agent records which ranks have exited
# immediately before it sends signals. A rank stopped by SIGSTOP or a debugger does not handle SIGTERM, so it is sent
# SIGCONT first. Killed ranks leave no error report, so the agent reads the last heartbeats from their store.


@dataclass(slots=True)
class RankNotes:
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
    attempt: Attempt = field(default_factory=Attempt)
    gone: frozenset[int] | None = None
    stopped: frozenset[int] = frozenset()
    seen_ns: int = 0
    signs: str = ""

    def explained(self, failures: Mapping[int, Failure]) -> dict[int, RankFailure]:
        """Return torch's failures with their exit causes, see Note [Exit cause]."""
        return {rank: self._explained(failure) for rank, failure in failures.items()}

    def _explained(self, failure: Failure) -> RankFailure:
        by_launcher = None
        if self.gone is not None:
            # A rank that had written its error report was about to exit by itself.
            by_launcher = failure.pid not in self.gone and time_of_word(failure) > self.seen_ns
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
def ranks_noted(notes: RankNotes) -> Iterator[None]:
    """Make torch's launcher use an agent that fills in `notes`."""
    launcher: Any = api  # elastic_launch reads the agent class from this module
    before = launcher.LocalElasticAgent
    launcher.LocalElasticAgent = partial(_RankAgent, notes)
    try:
        yield
    finally:
        launcher.LocalElasticAgent = before


class _RankAgent(LocalElasticAgent):
    def __init__(self, notes: RankNotes, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._notes = notes
        self._failures: dict[int, RankFailure] = {}
        self._processes: frozenset[int] = frozenset()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._notes.gone, self._notes.stopped, self._notes.signs = None, frozenset(), ""
        self._failures = {}
        started: dict[int, Any] = super()._start_workers(worker_group)
        if self._pcontext is not None:
            self._processes = frozenset(self._pcontext.pids().values())
            self._pcontext.close = partial(self._close, self._pcontext, self._pcontext.close)  # type: ignore[method-assign]
        return started

    def _close(self, context: PContext, close: Any, *arguments: Any, **settings: Any) -> None:
        processes = context.pids().values()
        if self._notes.gone is None:
            self._notes.gone = frozenset(process for process in processes if _has_ended(process))
            self._notes.seen_ns = time.time_ns()
        stopped = frozenset(process for process in processes if _is_stopped(process))
        self._notes.stopped |= stopped
        for process in stopped:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGCONT)  # torch makes each rank a process group leader
        close(*arguments, **settings)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            _end_what_is_left_of(self._processes)
            self._failures = self._notes.explained(result.failures)
            if self._failures and self._remaining_restarts == 0 and not has_left_word(self._failures):
                self._notes.signs = self._last_signs(worker_group)
        return result

    def _last_signs(self, worker_group: WorkerGroup) -> str:
        own = worker_group.spec.max_restarts - self._remaining_restarts
        attempt = self._notes.attempt.number
        return where_ranks_were(
            str(worker_group.master_addr),
            int(worker_group.master_port or 0),
            _world_size(worker_group),
            own if attempt is None else attempt,
            before=self._notes.seen_ns / 1e9,
        )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._failures:  # else another node failed, joined or left
            most = worker_group.spec.max_restarts
            line = restart_line(self._failures, _world_size(worker_group), most - self._remaining_restarts, most)
            print(line, file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)


def _end_what_is_left_of(ranks: frozenset[int]) -> None:
    """Kill orphans of ranks, such as the data loader workers of a killed rank."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):  # it has exited, or is another user's
            group = os.getpgid(process.pid)
            if group in ranks and process.pid != group:
                os.kill(process.pid, signal.SIGKILL)


def _world_size(worker_group: WorkerGroup) -> int:
    return int(worker_group.workers[0].world_size)


def _has_ended(process_id: int) -> bool:
    return _status(process_id) in (None, psutil.STATUS_ZOMBIE)


def _is_stopped(process_id: int) -> bool:
    return bool(_status(process_id) == psutil.STATUS_STOPPED)


def _status(process_id: int) -> str | None:
    try:
        return str(psutil.Process(process_id).status())
    except psutil.NoSuchProcess:
        return None
