"""One value per rank in the store, readable while collectives are blocked."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from booster.comm.collectives import group_size
from booster.comm.store_barrier import own_store

__all__ = ["NoticeBoard"]


class NoticeBoard:
    """One value per rank of the world, in the store of torch.distributed. Usable by a background thread.

    Args:
        name: Name of the values. Instances that exist at the same time have different names.

    Every rank makes it, in the same order. No communication with other ranks, and no waiting for one.
    """

    def __init__(self, name: str) -> None:
        self._num_ranks = group_size()
        self._store: Any = own_store(None, name) if self._num_ranks > 1 else _Alone()
        self._rank = dist.get_rank() if self._num_ranks > 1 else 0

    def post(self, note: str) -> None:
        """Set this rank's value.

        Raises:
            RuntimeError: The process that serves the store has ended.
        """
        self._store.set(str(self._rank), note)

    def withdraw(self) -> None:
        """Delete this rank's value. Raises as `post`."""
        self._store.delete_key(str(self._rank))

    def read(self) -> dict[int, str]:
        """Return the existing values by global rank. Raises as `post`."""
        keys = [str(rank) for rank in range(self._num_ranks)]
        return {int(key): bytes(self._store.get(key)).decode() for key in keys if self._store.check([key])}


class _Alone:
    """Store of a world of one rank."""

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
