"""Where the ranks of a launched world were, by what each said of itself last."""

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
_WORLD = "0/"  # torch's name of the first group of a process, and so of its keys
_ANSWER_SECONDS = 5.0  # for all questions; a store that is stopped answers none


def where_ranks_were(host: str, port: int, world_size: int, attempt: int, *, before: float) -> str:
    """Returns a line with the place of each rank; nothing where none can be asked for, as of a script without a launch.

    Args:
        host: Where the ranks' store is served.
        port: Its port there.
        world_size: Number of ranks.
        attempt: The how manieth start of all ranks, from 0.
        before: The moment, in seconds since 1970, from which it is told how long ago a place was.
    """
    found: list[str] = []

    def ask() -> None:
        # Nobody serves there any more, or says something else: there is nothing to tell.
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
    often = f"signs come {how_often(world_size)}, so a rank may have gone on after its last one"
    return f"booster run: where the ranks were by their last signs ({often}): {'; '.join([*places, *more])}"


def _connect(host: str, port: int) -> Any:
    socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()  # torch's client would try for long
    return TCPStore(host, port, None, False, timeout=timedelta(seconds=_CONNECT_SECONDS), wait_for_workers=False)


def _places(server: Any, num_ranks: int, attempt: int, before: float) -> list[str]:
    """Returns the places of ranks; empty where no rank of this attempt has given a sign."""
    launch, signs = 1, None
    while True:  # a script may launch several times; the last one that ranks came to counts
        store: Any = PrefixStore(f"booster/attempt_{attempt}/launch_{launch}", server)
        if not any(store.check([f"card/{rank}"]) for rank in range(num_ranks)):
            break
        launch, signs = launch + 1, PrefixStore("booster.signs", PrefixStore(_WORLD, store))
    if signs is None:
        return []
    notes = {rank: signs.get(str(rank)) for rank in range(num_ranks) if signs.check([str(rank)])}
    places = {rank: _place(json.loads(note), before) for rank, note in notes.items()}
    return [f"rank {rank}{places.get(rank, ': no sign')}" for rank in range(num_ranks)] if places else []


def _place(note: dict[str, Any], before: float) -> str:
    state = "" if note["state"] == "running" else f", its program had {note['state']}"
    return f", {max(0.0, before - note['at']):.1f} s before the end: {place_from_json(note['place'])}{state}"
