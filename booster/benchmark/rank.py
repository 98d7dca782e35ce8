"""Rank process of the benchmark: joins the process group, measures one configuration and returns JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no __all__ there

from booster.benchmark.configurations import Configuration
from booster.benchmark.measurement import measure
from booster.benchmark.settings import BenchmarkSettings
from booster.device import default_backend, device_type, set_device
from booster.launch import launch

__all__ = ["rank_main"]


def rank_main(connection: Connection, job: str) -> None:
    """Main function of a rank process; never returns.

    Args:
        connection: Pipe to the parent process. This process exits when the parent closes its end or dies.
        job: JSON object: rank, world_size, num_threads, store_port, store_prefix, configuration, settings.
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
        modes = tuple(job["settings"].pop("modes"))
        settings = BenchmarkSettings(**job["settings"], modes=modes)
        _join(job, settings)
        return {"figures": asdict(measure(configuration, settings))}
    except Exception as error:  # the process boundary: the parent reports it
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _join(job: dict[str, Any], settings: BenchmarkSettings) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(job["num_threads"])
    rank, world_size = job["rank"], job["world_size"]
    kind, device = device_type(), set_device(job["rank"])
    backend = default_backend(kind)
    timeout = timedelta(seconds=settings.timeout_seconds)
    # The parent serves the store, so its port is known to be free.
    store = TCPStore("127.0.0.1", job["store_port"], is_master=False, timeout=timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(job["store_prefix"], store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if kind == "cpu" else device,
    )
    launch(rank, world_size, "127.0.0.1", 0, backend, rank, verbose=False, timeout_seconds=settings.timeout_seconds)
