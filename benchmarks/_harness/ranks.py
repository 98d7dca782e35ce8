"""Starts fresh processes for one measurement, gives them a process group, and brings back what they returned."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankError", "World", "child_environment", "on_ranks"]

# glibc keeps freed blocks, so resident memory says little without these; with them steps are slower.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "1048576"}
_SECONDS_TO_LEAVE = 5.0


class RankError(RuntimeError):
    """A rank raised, died or was too late; the message says which and shows its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of one run.

    Attributes:
        size: Number of ranks.
        backend: Of the process group; None: no process group where there is one rank, else gloo.
        num_threads: Compute threads of every rank.
        timeout_seconds: After which the ranks are killed.
        environment: Variables that the ranks start with, beside those of this process.
    """

    size: int = 1
    backend: str | None = None
    num_threads: int = 1
    timeout_seconds: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def group_backend(self) -> str | None:
        """The backend to initialise, or None."""
        return self.backend or ("gloo" if self.size > 1 else None)


def child_environment(environment: Mapping[str, str], *, num_threads: int, gives_memory_back: bool) -> dict[str, str]:
    """Returns the environment that a rank must start with.

    Args:
        environment: The parent's.
        num_threads: For OpenMP, which reads it once.
        gives_memory_back: Have glibc return freed memory at once: for memory runs only, never while timing.
    """
    child = {name: value for name, value in environment.items() if not name.startswith("MALLOC_")}
    child["OMP_NUM_THREADS"] = str(num_threads)
    return child | (_GIVE_BACK if gives_memory_back else {})


def on_ranks(
    function: Callable[..., Any],
    world: World,
    *args: Any,
    gives_memory_back: bool = False,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Returns what `function(*args)` returned on each of the ranks, which are new processes.

    Args:
        function: A module's function; it, its arguments and its results travel between processes.
        world: How many ranks, and how they talk.
        *args: The function's arguments, the same on all ranks.
        gives_memory_back: See `child_environment`.
        preload: Fork the ranks off a server that has imported these modules, which saves seconds a rank. Not for
            memory runs: malloc reads its environment once, when the server starts.

    Raises:
        RankError: A rank raised, died or was too late; no process is left behind.
    """
    if preload and gives_memory_back:
        raise ValueError("preload and gives_memory_back exclude each other: a forked rank keeps its server's malloc")
    context = multiprocessing.get_context("forkserver" if preload else "spawn")
    context.set_forkserver_preload(list(preload))
    environment = child_environment(
        {**os.environ, **world.environment}, num_threads=world.num_threads, gives_memory_back=gives_memory_back
    )
    ranks: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="pair-") as directory:
        job = (world, str(Path(directory) / "store"), function, args)
        try:
            with _environment(environment):
                ranks.extend(_start(context, rank, job) for rank in range(world.size))
            results = _collect(ranks, world)
            _release(ranks)
            return results
        finally:
            _kill(ranks)


def _start(context: Any, rank: int, job: tuple[Any, ...]) -> tuple[BaseProcess, Connection]:
    here, there = context.Pipe()
    process = context.Process(target=_rank_main, args=(there, rank, *job), daemon=True)
    process.start()
    there.close()
    return process, here


@contextmanager
def _environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Lets children start with another environment; what they inherit can't be passed to them in another variant."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _collect(ranks: list[tuple[BaseProcess, Connection]], world: World) -> list[Any]:
    results: dict[int, Any] = {}
    numbers = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    deadline = time.monotonic() + world.timeout_seconds
    while len(results) < len(ranks):
        waiting = [connection for connection, rank in numbers.items() if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(numbers[connection] for connection in waiting)
            raise RankError(f"ranks {late} of {world.size} gave no result within {world.timeout_seconds:.0f} s")
        for connection in ready:
            rank = numbers[connection]
            results[rank] = _receive(connection, rank, ranks[rank][0])
    return [results[rank] for rank in range(len(ranks))]


def _receive(connection: Any, rank: int, process: BaseProcess) -> Any:
    try:
        has_returned, result = connection.recv()
    except EOFError:
        process.join(_SECONDS_TO_LEAVE)
        raise RankError(
            f"rank {rank} ended with exit code {process.exitcode} before it had a result; what it wrote is above"
        ) from None
    if not has_returned:
        raise RankError(f"rank {rank} failed:\n{result}")
    return result


def _release(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    """Lets all ranks go, now that none of them waits for another one any more."""
    for _, connection in ranks:
        connection.close()
    for process, _ in ranks:
        process.join(_SECONDS_TO_LEAVE)


def _kill(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    for process, connection in ranks:
        connection.close()
        process.kill()  # nothing happens to one that has ended
        process.join()
        process.close()


def _rank_main(
    connection: Connection, rank: int, world: World, store: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        _join(rank, world, store)
        connection.send((True, function(*args)))
    except Exception:
        # The edge of the process: the parent raises it.
        connection.send((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    connection.poll(world.timeout_seconds)  # until the parent lets go: other ranks may still talk to this one
    # Leaves at once: the libraries that are measured leave threads and groups behind that can block an orderly end.
    os._exit(0)


def _join(rank: int, world: World, store: str) -> None:
    torch.set_num_threads(world.num_threads)
    if world.group_backend is None:
        return
    # What torchrun sets and other libraries ask for; MASTER_ADDR is left out, as there is no port.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world.size), LOCAL_WORLD_SIZE=str(world.size)
    )
    device = None
    if world.group_backend == "nccl":
        device = torch.device("cuda", rank)
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        world.group_backend,
        store=dist.FileStore(store, world.size),
        rank=rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout_seconds),
        device_id=device,
    )
