"""Rank processes of the benchmark: started per configuration, awaited with a timeout, always cleaned up."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no __all__ there

from booster.cli.run.exit_report import killed_text
from booster.cli.run.node_config import rank_variables
from booster.device import num_cores
from booster.errors import BoosterError
from booster.launch.launch import launch_from_torch
from booster.optim.nvme_offload.pipeline import defer_sigint

from .config import SERIAL, BenchmarkSettings, Configuration
from .measure import Metrics, max_over_ranks, measure


def rank_main(connection: Connection, job: str) -> None:
    """Run the job, a JSON object of `WorkerPool`, send the result, and wait; never returns.

    This process exits when the parent closes its end of the pipe or dies.
    """
    threading.Thread(target=_exit_with_parent, args=(connection,), daemon=True).start()
    connection.send_bytes(json.dumps(_run_job(json.loads(job))).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    threading.Event().wait()  # other ranks may still communicate with this one


def _exit_with_parent(connection: Connection) -> None:
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        # Without destructors: those of process groups wait for collectives that other ranks may never join.
        os._exit(0)


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    try:
        configuration = Configuration(**job["configuration"])
        settings = BenchmarkSettings(**job["settings"] | {"modes": tuple(job["settings"]["modes"])})
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(job["num_threads"])
        os.environ.update(job["environment"])
        seconds = settings.timeout_seconds
        launch_from_torch(verbose=False, timeout_seconds=seconds, setup_timeout_seconds=seconds)
        return {"figures": asdict(measure(configuration, settings))}
    except Exception as error:  # the process boundary: the parent reports it
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Make processes started within the block, and their descendants, ignore SIGINT permanently."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


# Ranks are forked from a server with these modules imported: importing torch takes seconds per rank.
_PRELOADED = ["booster.cli.benchmark.workers", "booster.plugins.torch_ddp.plugin", "booster.plugins.low_level_zero"]
_PRELOADED += ["booster.plugins.gemini", "booster.plugins.hybrid_parallel", "torch._dynamo", "torch.distributed.tensor"]

_GRACE_SECONDS = 3.0  # after a first failure, for other ranks to report: one of them may be the root cause
_EXTRA_SECONDS = 5.0  # beyond the timeout of collectives, whose error is more detailed than ours
_CONSEQUENCE = ("RankFailedError", "DistBackendError", "DistNetworkError")

_Worker = tuple[ForkServerProcess, Connection]


class ConfigurationError(BoosterError):
    """Failed measurement of a configuration; the message has the rank and its traceback."""


class WorkerPool:
    """Worker processes that measure configurations, new ones for each configuration.

    Running processes are killed by `close`.
    """

    def __init__(self, settings: BenchmarkSettings) -> None:
        self._settings = settings
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        with ignore_sigint():
            forkserver.ensure_running()
        # Served here rather than in rank 0, so that no other process can take the port in between.
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=settings.timeout_seconds)
        )
        self._workers: list[_Worker] = []
        self._num_started = 0

    def measure(self, configuration: Configuration) -> Metrics:
        """Measure a configuration and return its metrics, each the maximum over ranks.

        Raises:
            ConfigurationError: A rank raised, died or timed out. All processes were killed.
        """
        num_ranks = 1 if configuration.mode == SERIAL else self._settings.num_ranks
        self._num_started += 1
        try:
            with defer_sigint():  # a half-started process would print an error about its pipe
                for rank in range(num_ranks):
                    self._start(rank, num_ranks, configuration)
            return max_over_ranks([Metrics(**response["figures"]) for response in self._gather_responses()])
        finally:
            self.close()

    def _start(self, rank: int, num_ranks: int, configuration: Configuration) -> None:
        job = {
            "environment": rank_variables(rank, num_ranks, self._store.port, self._num_started),
            "num_threads": max(1, num_cores() // num_ranks),
            "configuration": asdict(configuration),
            "settings": asdict(self._settings),
        }
        parent_end, child_end = self._context.Pipe()
        process = self._context.Process(target=rank_main, args=(child_end, json.dumps(job)), daemon=True)
        process.start()
        child_end.close()
        self._workers.append((process, parent_end))

    def _gather_responses(self) -> list[dict[str, Any]]:
        seconds = self._settings.timeout_seconds
        responses: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds + _EXTRA_SECONDS
        has_failed = False
        while len(responses) < len(self._workers):
            missing = [rank for rank in range(len(self._workers)) if rank not in responses]
            rank_of_connection = {self._workers[rank][1]: rank for rank in missing}
            ready = wait(list(rank_of_connection), max(0.0, deadline - time.monotonic()))
            if not ready and has_failed:
                break
            if not ready:
                raise ConfigurationError(
                    f"ranks {missing} of {len(self._workers)} timed out after {seconds:g} s and were killed: raise"
                    " --timeout, or reduce the sizes or steps"
                )
            for connection in ready:
                rank = rank_of_connection[connection]  # type: ignore[index]
                responses[rank] = self._receive(rank)
                if "error" in responses[rank] and not has_failed:
                    has_failed, deadline = True, time.monotonic() + _GRACE_SECONDS
        if has_failed:
            raise ConfigurationError(_root_cause_text(responses, len(self._workers)))
        return [responses[rank] for rank in range(len(self._workers))]

    def _receive(self, rank: int) -> dict[str, Any]:
        process, connection = self._workers[rank]
        try:
            response: dict[str, Any] = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process.join(_GRACE_SECONDS)
            return {"error": _exit_text(process.exitcode), "traceback": ""}
        return response

    def close(self) -> None:
        """Kill the running processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()  # no-op if it has exited
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers.clear()


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"the process exited with code {exit_code} without a result"
    return f"the process was {killed_text(exit_code)}"


def _root_cause_text(responses: dict[int, dict[str, Any]], num_ranks: int) -> str:
    """Return the error of the root cause: the first failure that is not a consequence of another."""
    failed = [rank for rank, response in responses.items() if "error" in response]
    cause = next((rank for rank in failed if not responses[rank]["error"].startswith(_CONSEQUENCE)), failed[0])
    response = responses[cause]
    return f"rank {cause} of {num_ranks} failed: {response['error']}\n{response['traceback']}".rstrip()
