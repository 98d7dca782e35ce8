"""One value per rank in the store, readable while collectives are blocked."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from booster.comm.collectives import group_size
from booster.comm.store_barrier import clone_store

__all__ = ["RankStore"]


class RankStore:
    """One value per rank of the world, in the store of torch.distributed. Usable by a background thread.

    Args:
        name: Name of the values. Instances that exist at the same time have different names.

    Every rank makes it, in the same order. No communication with other ranks, and no waiting for one.
    """

    def __init__(self, name: str) -> None:
        self._num_ranks = group_size()
        self._store: Any = clone_store(None, name) if self._num_ranks > 1 else _LocalStore()
        self._rank = dist.get_rank() if self._num_ranks > 1 else 0

    def set(self, value: str) -> None:
        """Set this rank's value.

        Raises:
            RuntimeError: The process that serves the store has ended.
        """
        self._store.set(str(self._rank), value)

    def delete(self) -> None:
        """Delete this rank's value. Raises as `set`."""
        self._store.delete_key(str(self._rank))

    def get_all(self) -> dict[int, str]:
        """Return the existing values by global rank. Raises as `set`."""
        keys = [str(rank) for rank in range(self._num_ranks)]
        return {int(key): bytes(self._store.get(key)).decode() for key in keys if self._store.check([key])}


class _LocalStore:
    """Store of a world of one rank."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def delete_key(self, key: str) -> None:
        self._values.pop(key, None)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key].encode()
