"""Errors of init_process_group that name the missing ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed.distributed_c10d import Store

from booster.errors import RankFailedError

__all__ = ["report_missing_ranks"]

_REPORT_SECONDS = 3.0
_RETRY_SECONDS = 0.02


@contextmanager
def report_missing_ranks(store: Store, rank: int, world_size: int) -> Iterator[None]:
    """Name the ranks that neither completed the block nor reported a failure, in errors of the block.

    Args:
        store: Store of this launch.
        rank: This rank.
        world_size: Number of ranks.

    Collective: every rank must enter it.

    Raises:
        RankFailedError: In place of any RuntimeError, which torch raises for lost and late ranks here.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError(
            f"rank {rank} could not connect with all ranks at the launch: {_missing_ranks(store, rank, world_size)};"
            f" torch reports: {str(error).splitlines()[0]}"
        ) from error
    if world_size > 1:
        with suppress(RuntimeError):  # rank 0 and its store are gone: the next collective raises
            store.set(f"joined/{rank}", "joined")


def _missing_ranks(store: Store, rank: int, world_size: int) -> str:
    try:
        store.set(f"joined/{rank}", "failed")
        waiting = _wait_for_others(store, world_size)
    except RuntimeError:  # the store is gone
        return "rank 0, whose process serves the store, has ended, or its host cannot be reached any more"
    if not waiting:
        return "no rank is missing; look at the others' output, and at the network between them"
    names = f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}"
    return (
        f"{names} did not report, though present at the rendezvous: see the log there, whether it was killed or hangs"
    )


def _wait_for_others(store: Store, world_size: int) -> list[int]:
    """Return the ranks that reported neither success nor failure within _REPORT_SECONDS."""
    deadline = time.monotonic() + _REPORT_SECONDS
    waiting = list(range(world_size))
    while waiting and time.monotonic() < deadline:
        waiting = [rank for rank in waiting if not store.check([f"joined/{rank}"])]
        time.sleep(_RETRY_SECONDS)
    return waiting
