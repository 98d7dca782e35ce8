"""What each rank says of itself, where all others may read it, also while no collective gets through."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from booster.comm.collectives import group_size
from booster.comm.store_barrier import own_store

__all__ = ["NoticeBoard"]


class NoticeBoard:
    """One note of each rank of the world, in the store of torch.distributed. For a background thread, too.

    Args:
        name: What it is for. Boards that live at the same time have different names.

    Every rank makes it, in the same order; no communication with other ranks, and nobody waits for one.
    """

    def __init__(self, name: str) -> None:
        self._num_ranks = group_size()
        self._store: Any = own_store(None, name) if self._num_ranks > 1 else _Alone()
        self._rank = dist.get_rank() if self._num_ranks > 1 else 0

    def post(self, note: str) -> None:
        """Puts up this rank's note, in place of its last.

        Raises:
            RuntimeError: The process that serves the store has ended.
        """
        self._store.set(str(self._rank), note)

    def withdraw(self) -> None:
        """Takes this rank's note away. Raises as `post`."""
        self._store.delete_key(str(self._rank))

    def read(self) -> dict[int, str]:
        """Returns the notes that are there, by world rank. Raises as `post`."""
        keys = [str(rank) for rank in range(self._num_ranks)]
        return {int(key): bytes(self._store.get(key)).decode() for key in keys if self._store.check([key])}


class _Alone:
    """The store of a world of one."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def set(self, key: str, note: str) -> None:
        self._notes[key] = note

    def delete_key(self, key: str) -> None:
        self._notes.pop(key, None)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._notes for key in keys)

    def get(self, key: str) -> bytes:
        return self._notes[key].encode()
