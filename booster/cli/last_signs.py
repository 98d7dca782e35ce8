"""Last heartbeats of the ranks of a failed launch, read from their store."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # no __all__ there
from torch.distributed.distributed_c10d import PrefixStore

from booster.comm.signs import heartbeat_interval, progress_from_json
from booster.threads_at_exit import join_at_exit

__all__ = ["describe_last_heartbeats"]

_MAX_LISTED = 16  # ranks
_CONNECT_TIMEOUT_SECONDS = 1.0
_WORLD_PREFIX = "0/"  # torch's name of a process's first group: the prefix of its keys
_READ_TIMEOUT_SECONDS = 5.0  # timeout of all requests together; a stopped store never replies


def describe_last_heartbeats(
    host: str, port: int, world_size: int, restart_count: int, *, reference_time: float
) -> str:
    """Return a line with the last heartbeat of each rank.

    The line is empty if the store is unreachable or has no heartbeats, as of a script that never initialized Booster.

    Args:
        host: Host of the ranks' store.
        port: Port of the ranks' store.
        world_size: Number of ranks.
        restart_count: Restart count of the job, from 0.
        reference_time: Reference time in seconds since 1970; ages of heartbeats are relative to it.
    """
    found: list[str] = []

    def ask() -> None:
        # The store is gone, or another service listens on its port.
        with suppress(DistError, OSError, RuntimeError, ValueError, KeyError, TypeError):
            found.extend(
                _read_heartbeats(_connect(host, port), min(world_size, _MAX_LISTED), restart_count, reference_time)
            )

    thread = threading.Thread(target=ask, name="booster-last-signs", daemon=True)
    join_at_exit(thread)
    thread.start()
    thread.join(_READ_TIMEOUT_SECONDS)
    heartbeats = list(found)
    if thread.is_alive() or not heartbeats:
        return ""
    more = [f"and {world_size - _MAX_LISTED} more ranks"] if world_size > _MAX_LISTED else []
    interval = f"sent {heartbeat_interval(world_size)}, so a rank may have continued after its last one"
    return f"booster run: last heartbeats of the ranks ({interval}): {'; '.join([*heartbeats, *more])}"


def _connect(host: str, port: int) -> Any:
    socket.create_connection(
        (host, port), timeout=_CONNECT_TIMEOUT_SECONDS
    ).close()  # torch's client retries for minutes
    return TCPStore(
        host, port, None, False, timeout=timedelta(seconds=_CONNECT_TIMEOUT_SECONDS), wait_for_workers=False
    )


def _read_heartbeats(store_client: Any, num_ranks: int, restart_count: int, reference_time: float) -> list[str]:
    launch, heartbeat_store = 1, None
    while True:  # a script may launch several times; the last launch that ranks joined counts
        store: Any = PrefixStore(f"booster/attempt_{restart_count}/launch_{launch}", store_client)
        if not any(store.check([f"card/{rank}"]) for rank in range(num_ranks)):
            break
        launch, heartbeat_store = launch + 1, PrefixStore("booster.signs", PrefixStore(_WORLD_PREFIX, store))
    if heartbeat_store is None:
        return []
    heartbeats = {
        rank: heartbeat_store.get(str(rank)) for rank in range(num_ranks) if heartbeat_store.check([str(rank)])
    }
    descriptions = {rank: _format_heartbeat(json.loads(note), reference_time) for rank, note in heartbeats.items()}
    return (
        [f"rank {rank}{descriptions.get(rank, ': no heartbeat')}" for rank in range(num_ranks)] if descriptions else []
    )


def _format_heartbeat(heartbeat: dict[str, Any], reference_time: float) -> str:
    state = "" if heartbeat["state"] == "running" else f", its script had {heartbeat['state']}"
    return f", {max(0.0, reference_time - heartbeat['time']):.1f} s before the end: {progress_from_json(heartbeat['progress'])}{state}"
