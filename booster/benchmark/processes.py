"""Starts the ranks of one configuration, waits for all of them, and leaves none behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no __all__ there

from booster.benchmark.configurations import SERIAL, Configuration
from booster.benchmark.interrupts import interrupts_deferred, interrupts_ignored
from booster.benchmark.measurement import Figures, largest
from booster.benchmark.rank import rank_main
from booster.benchmark.settings import BenchmarkSettings
from booster.errors import BoosterError

__all__ = ["ConfigurationError", "Ranks"]

# Ranks are forked from a server that has imported what all of them need: importing torch anew takes seconds a rank.
_PRELOADED = ["booster.benchmark.rank", "booster.plugins.torch_ddp", "booster.plugins.low_level_zero"]
_PRELOADED += ["booster.plugins.gemini", "booster.plugins.hybrid_parallel", "torch._dynamo", "torch.distributed.tensor"]

_SECONDS_FOR_OTHERS = 3.0  # after a first failure, until the ranks that only follow it have said theirs
_SECONDS_BEYOND = 5.0  # a collective that is too late says more of what it waited for than we can
_CONSEQUENCE = ("RankFailedError", "DistBackendError", "DistNetworkError")

_Member = tuple[ForkServerProcess, Connection]


class ConfigurationError(BoosterError):
    """A configuration that could not be measured; the message has the rank and its traceback."""


class Ranks:
    """Measures configurations, each in processes of its own, so that none sees what another one left or broke.

    To be used as a context: what is under way at its end is killed.

    Args:
        settings: Of all configurations.
    """

    def __init__(self, settings: BenchmarkSettings) -> None:
        self._settings = settings
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        with interrupts_ignored():
            forkserver.ensure_running()
        # Here and not in rank 0, so that no other process can take the port in between.
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=settings.timeout_seconds)
        )
        self._members: list[_Member] = []
        self._num_started = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def measure(self, configuration: Configuration) -> Figures:
        """Returns the largest figures over the ranks.

        Raises:
            ConfigurationError: A rank raised, died or was too late. No process is left.
        """
        num_ranks = 1 if configuration.mode == SERIAL else self._settings.num_ranks
        self._num_started += 1
        try:
            with interrupts_deferred():
                for rank in range(num_ranks):
                    self._start(rank, num_ranks, configuration)
            return largest([Figures(**answer["figures"]) for answer in self._answers(configuration)])
        finally:
            self._kill()

    def _start(self, rank: int, num_ranks: int, configuration: Configuration) -> None:
        job = {
            "rank": rank,
            "world_size": num_ranks,
            "num_threads": max(1, num_cores() // num_ranks),
            "store_port": self._store.port,
            "store_prefix": f"configuration {self._num_started}",
            "configuration": asdict(configuration),
            "settings": asdict(self._settings),
        }
        here, there = self._context.Pipe()
        process = self._context.Process(target=rank_main, args=(there, json.dumps(job)), daemon=True)
        process.start()
        there.close()
        self._members.append((process, here))

    def _answers(self, configuration: Configuration) -> list[dict[str, Any]]:
        seconds = self._settings.timeout_seconds
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds + _SECONDS_BEYOND
        has_failed = False
        while len(answers) < len(self._members):
            missing = [rank for rank in range(len(self._members)) if rank not in answers]
            numbers = {self._members[rank][1]: rank for rank in missing}
            ready = wait(list(numbers), max(0.0, deadline - time.monotonic()))
            if not ready and has_failed:
                break
            if not ready:
                raise ConfigurationError(
                    f"ranks {missing} of {len(self._members)} gave no result within {seconds:g} s and were ended: give"
                    " them longer (--timeout), or less to do"
                )
            for connection in ready:
                rank = numbers[connection]  # type: ignore[index]
                answers[rank] = self._receive(rank)
                if "error" in answers[rank] and not has_failed:
                    has_failed, deadline = True, time.monotonic() + _SECONDS_FOR_OTHERS
        if has_failed:
            raise ConfigurationError(_failure(answers, len(self._members)))
        return [answers[rank] for rank in range(len(self._members))]

    def _receive(self, rank: int) -> dict[str, Any]:
        process, connection = self._members[rank]
        try:
            answer: dict[str, Any] = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process.join(_SECONDS_FOR_OTHERS)
            return {"error": _ending(process.exitcode), "traceback": ""}
        return answer

    def _kill(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.kill()  # nothing happens to one that has ended
        for process, _ in self._members:
            process.join()
            process.close()
        self._members.clear()


def num_cores() -> int:
    """Returns how many cores this process may use, which a container or a scheduler may have made fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ending(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"the process ended with exit code {exit_code} before it had a result"
    hint = ", as the system does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"the process was killed by {signal.Signals(-exit_code).name}{hint}"


def _failure(answers: dict[int, dict[str, Any]], num_ranks: int) -> str:
    """Returns what the rank says that failed first, and not because another one did."""
    failed = [rank for rank, answer in answers.items() if "error" in answer]
    cause = next((rank for rank in failed if not answers[rank]["error"].startswith(_CONSEQUENCE)), failed[0])
    answer = answers[cause]
    return f"rank {cause} of {num_ranks} failed: {answer['error']}\n{answer['traceback']}".rstrip()
