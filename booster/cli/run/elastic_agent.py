"""Launch of this machine's ranks by torch's elastic agent, extended by exit causes, resumption and restart lines."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # no __all__ there
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.launcher import api

from booster.errors import ConfigError, RankFailedError, first_line
from booster.fault_tolerance.heartbeat import heartbeat_interval_text, progress_from_json
from booster.fault_tolerance.threads import join_at_exit

from . import launcher_protocol
from .exit_report import RankFailure, exit_code_of, has_error_report, report, report_time, restart_line
from .hosts import LAUNCHER_ONLY
from .log_prefix import PrefixedOutput, RankLogs
from .node_config import default_omp_threads, launch_config, worker_command
from .rendezvous_handler import RestartCount
from .signals import terminate_on_signal

_MAX_LISTED = 16  # ranks
_CONNECT_TIMEOUT_SECONDS = 1.0
_WORLD_PREFIX = "0/"  # torch's name of a process's first group: the prefix of its keys
_READ_TIMEOUT_SECONDS = 5.0  # timeout of all requests together; a stopped store never replies


def launch_node(arguments: argparse.Namespace, num_ranks: int) -> int:
    """Start this machine's ranks and wait for them. Must be called in the main thread.

    Returns:
        Exit code: 0, or that of the rank that failed first. As in a shell, a rank or launcher killed by signal n counts
        as 128 + n.

    Raises:
        ConfigError: The rendezvous of the machines failed, or this torch's launcher lacks a setting.
        RankFailedError: Ranks can't be restarted, because another machine's launcher exited.
    """
    log_dir = tempfile.mkdtemp(prefix="booster_run_")
    try:
        with (
            default_omp_threads(num_ranks),
            _serve_remote_launcher(arguments.as_host) as (output, stdin_fd),
            terminate_on_signal(stdin_fd=stdin_fd, clean_up=lambda: shutil.rmtree(log_dir, ignore_errors=True)),
        ):
            return _launch(arguments, num_ranks, log_dir, output)
    except SignalException as error:
        if arguments.as_host is None:  # else the launcher that started this one reports it once for all hosts
            print(f"booster run: terminated by {error.sigval.name}, with all ranks", file=sys.stderr)
        return 128 + int(error.sigval)
    except KeyboardInterrupt:  # while our handlers are not installed
        return 130
    finally:
        shutil.rmtree(log_dir, ignore_errors=True)


def _launch(arguments: argparse.Namespace, num_ranks: int, log_dir: str, output: PrefixedOutput | None) -> int:
    restart_count = RestartCount()
    records = ExitRecords(host=arguments.as_host or "", restart_count=restart_count)
    logs = RankLogs(log_dir, output, lambda: restart_count.value)
    config = launch_config(arguments, num_ranks, logs, restart_count)
    _silence_elastic_logs()
    try:
        with record_exits(records):
            api.elastic_launch(config, sys.executable)(*worker_command(arguments))
    except ChildFailedError as error:
        failures = records.with_exit_causes(error.failures)
        if config.max_restarts:
            line = f"booster run: all restarts of --max-restarts {config.max_restarts} are used, so the run ends"
            print(line, file=sys.stderr, flush=True)
        if output is None:
            print(report(failures, logs.world_size), file=sys.stderr, flush=True)
        else:
            launcher_protocol.send_failures(failures, logs.world_size)
        if records.last_heartbeats:  # last: a heartbeat must not be mistaken for the position of the failure
            print(records.last_heartbeats, file=sys.stderr, flush=True)
        return exit_code_of(failures)
    except RendezvousClosedError as error:
        raise RankFailedError(
            "another machine of this run exited while the ranks were being restarted: see its output, and start all "
            "machines again"
        ) from error
    except (DistError, RendezvousError) as error:
        reason = first_line(error.__cause__ or error)
        raise ConfigError(
            f"the rendezvous at {config.rdzv_endpoint} failed ({reason}): check that all machines of the run were "
            "started, the address is machine 0's, and its port is open and free, or change them with --master-addr and "
            "--master-port"
        ) from error
    return 0


@contextmanager
def _serve_remote_launcher(name: str | None) -> Iterator[tuple[PrefixedOutput | None, int | None]]:
    """Serve the launcher that started this one over ssh, see Note [Launcher protocol].

    The exit of that launcher closes this process's stdin. Ranks get /dev/null instead, as they would consume stdin.
    """
    if name is None:
        yield None, None
        return
    for variable in os.environ.pop(LAUNCHER_ONLY, "").split(","):
        os.environ.pop(variable, None)
    launcher_protocol.send_started()
    stdin_fd = os.dup(0)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    output = PrefixedOutput(name)
    try:
        yield output, stdin_fd
    finally:
        output.close()
        os.dup2(stdin_fd, 0)
        os.close(stdin_fd)


def _silence_elastic_logs() -> None:
    # `report` prints the failures; torch's logs repeat them, unless the user asked for them.
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each logger has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)


def describe_last_heartbeats(
    host: str, port: int, world_size: int, restart_count: int, *, reference_time: float
) -> str:
    """Return a line with the last heartbeat of each rank, from the ranks' store.

    The line is empty if the store is unreachable or has no heartbeats, as of a script that never initialized Booster.
    Ages of heartbeats are relative to the reference time, in seconds since 1970.
    """
    found: list[str] = []

    def ask() -> None:
        # The store is gone, or another service listens on its port.
        with suppress(DistError, OSError, RuntimeError, ValueError, KeyError, TypeError):
            client, num_ranks = _connect(host, port), min(world_size, _MAX_LISTED)
            found.extend(_read_heartbeats(client, num_ranks, restart_count, reference_time))

    thread = threading.Thread(target=ask, name="booster-last-heartbeats", daemon=True)
    join_at_exit(thread)
    thread.start()
    thread.join(_READ_TIMEOUT_SECONDS)
    if thread.is_alive() or not found:
        return ""
    more = [f"and {world_size - _MAX_LISTED} more ranks"] if world_size > _MAX_LISTED else []
    interval = f"sent {heartbeat_interval_text(world_size)}, so a rank may have continued after its last one"
    return f"booster run: last heartbeats of the ranks ({interval}): {'; '.join([*found, *more])}"


def _connect(host: str, port: int) -> Any:
    # torch's client retries for minutes.
    socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_SECONDS).close()
    timeout = timedelta(seconds=_CONNECT_TIMEOUT_SECONDS)
    return TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)


def _read_heartbeats(store_client: Any, num_ranks: int, restart_count: int, reference_time: float) -> list[str]:
    launch, heartbeat_store = 1, None
    while True:  # a script may launch several times; the last launch that ranks joined counts
        store: Any = PrefixStore(f"booster/attempt_{restart_count}/launch_{launch}", store_client)
        if not any(store.check([f"card/{rank}"]) for rank in range(num_ranks)):
            break
        launch, heartbeat_store = launch + 1, PrefixStore("booster.heartbeats", PrefixStore(_WORLD_PREFIX, store))
    if heartbeat_store is None:
        return []
    descriptions: dict[int, str] = {}
    for rank in range(num_ranks):
        if not heartbeat_store.check([str(rank)]):
            continue
        heartbeat = json.loads(heartbeat_store.get(str(rank)))
        state = "" if heartbeat["state"] == "running" else f", its script had {heartbeat['state']}"
        age = max(0.0, reference_time - heartbeat["time"])
        progress = progress_from_json(heartbeat["progress"])
        descriptions[rank] = f", {age:.1f} s before the end: {progress}{state}"
    if not descriptions:
        return []
    return [f"rank {rank}{descriptions.get(rank, ': no heartbeat')}" for rank in range(num_ranks)]


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
        restart_count: Restart count of the job, where torch's own may differ between nodes.
        exited: Processes that had exited before the launcher terminated the others; None if it terminated none.
        stopped: Processes that were stopped at that time.
        checked_ns: Time of that check, by this machine's clock.
        last_heartbeats: Description of the ranks' last heartbeats, if they were read.
    """

    host: str = ""
    restart_count: RestartCount = field(default_factory=RestartCount)
    exited: frozenset[int] | None = None
    stopped: frozenset[int] = frozenset()
    checked_ns: int = 0
    last_heartbeats: str = ""

    def with_exit_causes(self, failures: Mapping[int, ProcessFailure]) -> dict[int, RankFailure]:
        """Return torch's failures with their exit causes, see Note [Exit cause]."""
        found: dict[int, RankFailure] = {}
        for rank, failure in failures.items():
            found[rank] = RankFailure(
                host=self.host,
                local_rank=failure.local_rank,
                pid=failure.pid,
                exitcode=failure.exitcode,
                error_file_data=failure.error_file_data,
                was_stopped=failure.pid in self.stopped,
            )
            if self.exited is not None:
                # A rank that had written its error report was about to exit by itself.
                found[rank].by_launcher = failure.pid not in self.exited and report_time(found[rank]) > self.checked_ns
        return found


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
            ended = (None, psutil.STATUS_ZOMBIE)
            self._records.exited = frozenset(process for process in processes if _status(process) in ended)
            self._records.checked_ns = time.time_ns()
        stopped = frozenset(process for process in processes if _status(process) == psutil.STATUS_STOPPED)
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
            int(worker_group.workers[0].world_size),
            local_count if restart_count is None else restart_count,
            reference_time=self._records.checked_ns / 1e9,
        )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._failures:  # else another node failed, joined or left
            world_size, max_restarts = int(worker_group.workers[0].world_size), worker_group.spec.max_restarts
            line = restart_line(self._failures, world_size, max_restarts - self._remaining_restarts, max_restarts)
            print(line, file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)


def _kill_orphans(ranks: frozenset[int]) -> None:
    """Kill orphans of ranks, such as the data loader workers of a killed rank."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):  # it has exited, or is another user's
            group = os.getpgid(process.pid)
            if group in ranks and process.pid != group:
                os.kill(process.pid, signal.SIGKILL)


def _status(process_id: int) -> str | None:
    try:
        return str(psutil.Process(process_id).status())
    except psutil.NoSuchProcess:
        return None
