"""Making the world's process group: an error that names the ranks that were lost meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed.distributed_c10d import Store

from booster.errors import RankFailedError

__all__ = ["missing_ranks_named"]

_REPORT_SECONDS = 3.0
_PAUSE_SECONDS = 0.02


@contextmanager
def missing_ranks_named(store: Store, rank: int, world_size: int) -> Iterator[None]:
    """Says of an error within the block which ranks did not come through it, nor say that they failed in it too.

    Args:
        store: Of this launch alone.
        rank: This rank.
        world_size: How many there are.

    Collective: every rank must enter it.

    Raises:
        RankFailedError: In place of any RuntimeError, as torch has them for lost and late ranks here.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError(
            f"rank {rank} could not connect with all ranks at the launch: {_missing(store, rank, world_size)};"
            f" torch says: {str(error).splitlines()[0]}"
        ) from error
    if world_size > 1:
        with suppress(RuntimeError):  # rank 0 has gone with its store: the next communication says so
            store.set(f"joined/{rank}", "joined")


def _missing(store: Store, rank: int, world_size: int) -> str:
    try:
        store.set(f"joined/{rank}", "failed")
        waiting = _wait_for_others(store, world_size)
    except RuntimeError:  # the store is gone
        return "rank 0, whose process serves the store, has ended, or its machine can't be reached any more"
    if not waiting:
        return "no rank is missing; look at the others' output, and at the network between them"
    names = f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}"
    return f"{names} gave no sign, though there when all ranks met: look there, whether it was killed or hangs"


def _wait_for_others(store: Store, world_size: int) -> list[int]:
    """Returns the ranks that neither joined nor failed, once they have had time to say so."""
    deadline = time.monotonic() + _REPORT_SECONDS
    waiting = list(range(world_size))
    while waiting and time.monotonic() < deadline:
        waiting = [rank for rank in waiting if not store.check([f"joined/{rank}"])]
        time.sleep(_PAUSE_SECONDS)
    return waiting
