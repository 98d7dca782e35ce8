"""torch's elastic agent, which also notes how ranks ended, lets stopped ones end, and says when all start anew."""

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

# Note [Who ended a rank]
# As soon as torch's agent finds a rank that has failed, it ends all others by SIGTERM, and after 30 s by SIGKILL. From
# their exit codes one can't tell who sent the signals: a rank that the system killed and one that the agent did look
# the same. So this agent looks at its ranks at the last moment before: who has ended then did so without its doing.
# A rank that is stopped, by SIGSTOP or a debugger, takes no SIGTERM, and the agent would wait in vain: it is told to
# go on first. And as ranks that are killed leave no word, the agent asks their store for what all said last.


@dataclass(slots=True)
class RankNotes:
    """What is known of the ranks of this machine beyond what torch says of them.

    Attributes:
        host: The machine's name, "" where there is no other.
        attempt: Number of the last start of all ranks, where torch's own may differ between machines.
        gone: Processes that had ended before the launcher ended the others; None: it has ended none.
        stopped: Processes that were stopped then.
        seen_ns: When that was, by this machine's clock.
        signs: Where the ranks were by their last signs, if they are asked for.
    """

    host: str = ""
    attempt: Attempt = field(default_factory=Attempt)
    gone: frozenset[int] | None = None
    stopped: frozenset[int] = frozenset()
    seen_ns: int = 0
    signs: str = ""

    def explained(self, failures: Mapping[int, Failure]) -> dict[int, RankFailure]:
        """Returns torch's failures with who ended each rank, see Note [Who ended a rank]."""
        return {rank: self._explained(failure) for rank, failure in failures.items()}

    def _explained(self, failure: Failure) -> RankFailure:
        by_launcher = None
        if self.gone is not None:
            # One that had said why it fails, and was about to end, has ended by itself.
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
    """Makes torch's launcher start ranks by an agent that takes these notes."""
    launcher: Any = api  # it takes the agent's class from here
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
        """Looks at the ranks before torch ends those that run."""
        processes = context.pids().values()
        if self._notes.gone is None:
            self._notes.gone = frozenset(process for process in processes if _has_ended(process))
            self._notes.seen_ns = time.time_ns()
        stopped = frozenset(process for process in processes if _is_stopped(process))
        self._notes.stopped |= stopped
        for process in stopped:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGCONT)  # torch makes each rank the leader of a group
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
        if self._failures:  # else it is another machine that failed, came or went
            most = worker_group.spec.max_restarts
            line = restart_line(self._failures, _world_size(worker_group), most - self._remaining_restarts, most)
            print(line, file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)


def _end_what_is_left_of(ranks: frozenset[int]) -> None:
    """Ends processes that ranks had started and that outlive them, as a killed rank's data loading workers do."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):  # it has ended meanwhile, or is another user's
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
