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

from booster.comm.signs import how_often, place_from_json
from booster.threads_at_exit import join_at_exit

__all__ = ["where_ranks_were"]

_MAX_LISTED = 16  # ranks
_CONNECT_SECONDS = 1.0
_WORLD = "0/"  # torch's name of a process's first group: the prefix of its keys
_ANSWER_SECONDS = 5.0  # timeout of all requests together; a stopped store never replies


def where_ranks_were(host: str, port: int, world_size: int, attempt: int, *, before: float) -> str:
    """Return a line with the last heartbeat of each rank.

    The line is empty if the store is unreachable or has no heartbeats, as of a script that never initialized Booster.

    Args:
        host: Host of the ranks' store.
        port: Port of the ranks' store.
        world_size: Number of ranks.
        attempt: Restart count of the job, from 0.
        before: Reference time in seconds since 1970; ages of heartbeats are relative to it.
    """
    found: list[str] = []

    def ask() -> None:
        # The store is gone, or another service listens on its port.
        with suppress(DistError, OSError, RuntimeError, ValueError, KeyError, TypeError):
            found.extend(_places(_connect(host, port), min(world_size, _MAX_LISTED), attempt, before))

    asking = threading.Thread(target=ask, name="booster-last-signs", daemon=True)
    join_at_exit(asking)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    places = list(found)
    if asking.is_alive() or not places:
        return ""
    more = [f"and {world_size - _MAX_LISTED} more ranks"] if world_size > _MAX_LISTED else []
    often = f"sent {how_often(world_size)}, so a rank may have continued after its last one"
    return f"booster run: last heartbeats of the ranks ({often}): {'; '.join([*places, *more])}"


def _connect(host: str, port: int) -> Any:
    socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()  # torch's client retries for minutes
    return TCPStore(host, port, None, False, timeout=timedelta(seconds=_CONNECT_SECONDS), wait_for_workers=False)


def _places(server: Any, num_ranks: int, attempt: int, before: float) -> list[str]:
    launch, signs = 1, None
    while True:  # a script may launch several times; the last launch that ranks joined counts
        store: Any = PrefixStore(f"booster/attempt_{attempt}/launch_{launch}", server)
        if not any(store.check([f"card/{rank}"]) for rank in range(num_ranks)):
            break
        launch, signs = launch + 1, PrefixStore("booster.signs", PrefixStore(_WORLD, store))
    if signs is None:
        return []
    notes = {rank: signs.get(str(rank)) for rank in range(num_ranks) if signs.check([str(rank)])}
    places = {rank: _place(json.loads(note), before) for rank, note in notes.items()}
    return [f"rank {rank}{places.get(rank, ': no heartbeat')}" for rank in range(num_ranks)] if places else []


def _place(note: dict[str, Any], before: float) -> str:
    state = "" if note["state"] == "running" else f", its script had {note['state']}"
    return f", {max(0.0, before - note['at']):.1f} s before the end: {place_from_json(note['place'])}{state}"
