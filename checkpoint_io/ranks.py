"""The ranks that save or load together: what one of them alone can see fails all of them, before anything changes."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from booster.comm import all_gather_equal, gather_distinct, group_rank, group_size, raise_on_all_ranks
from booster.errors import BoosterError, CheckpointError

__all__ = ["Ranks", "as_checkpoint_error"]

T = TypeVar("T")


class Ranks:
    """The ranks of one checkpoint call.

    Args:
        group: The ranks that call together; None: the world, or this process alone where nothing was launched.
        host: Name of the machine that this rank runs on; None: asked of the system.

    Attributes:
        host: The same on ranks of the same machine alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, host: str | None = None) -> None:
        self.group = group
        self.host = f"{socket.gethostname()}/{uuid.getnode():x}" if host is None else host

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return group_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return group_size(self.group)

    def agree(self, action: Callable[[], T], doing: str) -> T:
        """Return what the action gives, once it succeeded on every rank; else raises on every rank. Collective.

        Args:
            action: What this rank does. It must not call collectives, but for one that comes first and in which what
                fails on one rank fails on all.
            doing: What it is part of, for messages.
        """
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(action())
        except Exception as error:  # raised below, by every rank
            failure = as_checkpoint_error(error, doing)
        raise_on_all_ranks(failure, self.group)
        return results[0]

    def agree_rank_zero_first(self, action: Callable[[], T], doing: str) -> T:
        """As `agree`; the others begin when rank 0 is through: what it found on the disk is there for certain."""
        first = self.agree(lambda: [action()] if self.rank == 0 else [], doing)
        return self.agree(lambda: first[0] if self.rank == 0 else action(), doing)

    def gather(self, payload: bytes) -> tuple[list[bytes], list[int]]:
        """Return the different payloads of all ranks, and for every rank which of them is its own. Collective."""
        return gather_distinct(payload, self.group)

    def gather_equal(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, which have the same length, by rank. Collective."""
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return [bytes(row.numpy()) for row in all_gather_equal(mine, self.group).view(self.size, -1)]


def as_checkpoint_error(error: Exception, doing: str) -> Exception:
    """Return the error for the user: the file system's, with what was going on; any other as it is."""
    if isinstance(error, BoosterError) or not isinstance(error, OSError):
        return error
    failure = CheckpointError(f"{doing} failed: {error}. Check the path, its permissions and the free space")
    failure.__cause__ = error
    return failure
