"""Runs cases of `loss_program` by real processes without a launcher, several at a time, and says how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from faults.loss_program import CHECKPOINT_SECONDS, SETUP_SECONDS, TRAINING_SECONDS, Case, run_rank
from harness.forkserver import Device, start_context

from booster.fault_tolerance.fault_injection import OPERATIONS
from booster.fault_tolerance.progress import SAVE_PHASES

# Survivors have the time limit of what they wait in, and this to find out who is missing and to end.
END_SECONDS = 5.0
BUSY_SECONDS = 10.0  # on top of that, where other programs want the processors
_START_SECONDS = 90.0  # until the fault strikes; on a busy machine
_STACK_SECONDS = 5.0
# Who leaves early is told that others failed for it, and ends with an error, too.
_KILLED_BY = {"kill": -signal.SIGKILL, "throw": 1, "leave": 1, "delay": 1}


def delay_beyond_the_limit(phase: str) -> float:
    """Returns how many seconds a rank must be late at a phase, so that the others have given it up."""
    return limit_at(phase) + 3.0


def limit_at(phase: str) -> float:
    """Returns the longest wait of the others for a rank that is lost at a phase, in seconds."""
    if phase == "boost":
        return SETUP_SECONDS
    # A rank that is lost where no rank waits for it is missed in the next step, or in the save that follows.
    return max(TRAINING_SECONDS, CHECKPOINT_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        code: Exit code, or the negative number of a signal; None: it was still there when time was up.
        seconds: How long after the fault.
        error: Class and text of the error that ended it; empty: none.
        marks: Which parts of the program it began.
        output: What it wrote.
    """

    code: int | None
    seconds: float
    error: tuple[str, str]
    marks: list[str]
    output: str


@dataclass(slots=True, kw_only=True)
class Running:
    """A case whose ranks run.

    Attributes:
        case: Which.
        directory: Where it writes.
        processes: The ranks.
        ended_at: When each rank that is gone was found to be.
    """

    case: Case
    directory: Path
    processes: list[BaseProcess]
    started_at: float
    ended_at: dict[int, float] = field(default_factory=dict)

    @property
    def awaited(self) -> list[int]:
        """The ranks that are to end by themselves."""
        faulty = self.case.fault.rank if self.case.fault.action == "stop" else None
        return [rank for rank in range(self.case.world_size) if rank != faulty]

    @property
    def is_over(self) -> bool:
        """Whether all that are to end have ended."""
        return all(rank in self.ended_at for rank in self.awaited)

    def struck_at(self) -> float | None:
        """When the fault struck, or a little before; None: the rank has not come there yet."""
        fault = self.case.fault
        marks = [line.split(maxsplit=1) for line in _lines(self.directory / f"marks-{fault.rank}")]
        if fault.at in OPERATIONS:  # in whatever part it was last
            return float(marks[-1][0]) if marks else None
        part = "save" if fault.at in SAVE_PHASES else fault.at
        name = part if part in ("boost", "load") else f"{part} {fault.call}"
        return next((float(time) for time, begun in marks if begun == name), None)

    def deadline(self) -> float:
        """When every survivor must have ended."""
        struck_at, fault = self.struck_at(), self.case.fault
        if struck_at is None:
            return self.started_at + _START_SECONDS
        return struck_at + fault.seconds + limit_at(fault.at) + END_SECONDS + BUSY_SECONDS


def start(case: Case, directory: Path, device: Device = "cpu") -> Running:
    """Starts the ranks of a case on a device; they write into a new directory."""
    directory.mkdir()
    context, port = start_context(device), _free_port()
    processes = [
        context.Process(target=run_rank, args=(case, rank, port, str(directory)), daemon=True)
        for rank in range(case.world_size)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    return Running(case=case, directory=directory, processes=list(processes), started_at=began)


def finish(running: Running, beside: list[Running]) -> tuple[list[RankEnd], list[str]]:
    """Returns how the ranks of a case ended, and what was left of them; nothing is any more.

    Args:
        running: The case.
        beside: Others that run meanwhile: the times of their ends are noted too.
    """
    try:
        while not running.is_over and time.monotonic() < running.deadline():
            _note_ends([running, *beside])
        late = [rank for rank in running.awaited if rank not in running.ended_at]
        for rank in late:  # writes its stacks
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(running.processes[rank].pid, signal.SIGABRT)
        for rank in late:
            running.processes[rank].join(_STACK_SECONDS)
        leftovers = list(_leftovers(running))
        return [_end_of(running, rank) for rank in range(running.case.world_size)], leftovers
    finally:
        end(running)


def end(running: Running) -> None:
    """Ends what is left of a case."""
    for process in running.processes:
        process.kill()  # a stopped one as well; of one that is gone nothing happens
        process.join()


def expected_code(case: Case) -> int:
    """Returns the exit code of the rank that the fault strikes."""
    return _KILLED_BY[case.fault.action]


def _note_ends(all_running: list[Running]) -> None:
    waiting = {
        process.sentinel: (running, rank)
        for running in all_running
        for rank, process in enumerate(running.processes)
        if rank not in running.ended_at
    }
    for sentinel in connection.wait(list(waiting), timeout=0.1):
        running, rank = waiting[sentinel]
        running.ended_at[rank] = time.monotonic()


def _end_of(running: Running, rank: int) -> RankEnd:
    process, directory = running.processes[rank], running.directory
    error = directory / f"error-{rank}"
    struck_at = running.struck_at() or running.started_at
    is_there = rank not in running.ended_at
    return RankEnd(
        code=None if is_there else process.exitcode,
        seconds=(time.monotonic() if is_there else running.ended_at[rank]) - struck_at,
        error=tuple(json.loads(error.read_text())) if error.exists() else ("", ""),
        marks=[line.split(maxsplit=1)[1] for line in _lines(directory / f"marks-{rank}")],
        output="\n".join(_lines(directory / f"output-{rank}")),
    )


def _leftovers(running: Running) -> Iterator[str]:
    """Yields the processes that ranks have started and that outlive them."""
    ranks = {process.pid: rank for rank, process in enumerate(running.processes)}
    for process in psutil.process_iter():
        try:
            session = os.getsid(process.pid)
            if session in ranks and process.pid not in ranks and process.status() != psutil.STATUS_ZOMBIE:
                yield f"rank {ranks[session]} left {process}"
        except (ProcessLookupError, psutil.NoSuchProcess):  # it has ended meanwhile
            continue


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _free_port() -> int:
    """Returns a port below those that the system gives to connections, of which one might take it meanwhile."""
    for port in random.SystemRandom().sample(range(15000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports is free")
