"""Process group of a checkpoint call: errors on one rank are raised on all ranks, before anything changes."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from booster.comm import group_rank, group_size, raise_on_all_ranks
from booster.errors import BoosterError, CheckpointError

T = TypeVar("T")


class CheckpointGroup:
    """Process group of one checkpoint call.

    Args:
        group: Process group. Optional, defaults to the world, or to this process alone if torch.distributed is not
            initialized.
        host: Host name of this rank. Optional, defaults to the system's.

    Attributes:
        group: Process group as given.
        host: Identifier that is equal only for ranks on the same machine.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, host: str | None = None) -> None:
        self.group = group
        self.host = f"{socket.gethostname()}/{uuid.getnode():x}" if host is None else host

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return group_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return group_size(self.group)

    def run_on_all_ranks(self, action: Callable[[], T], action_name: str) -> T:
        """Run `action` and return its result if it succeeds on every rank; else raise on every rank. Collective.

        Args:
            action: Function to run. It must not call collectives, except as its first step and if any failure of that
                step occurs on all ranks.
            action_name: Description of the operation for messages.
        """
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(action())
        except Exception as error:  # raised below on every rank
            failure = as_checkpoint_error(error, action_name)
        raise_on_all_ranks(failure, self.group)
        return results[0]


def as_checkpoint_error(error: Exception, action_name: str) -> Exception:
    """Wrap an OSError with a description of the operation; return other errors unchanged."""
    if isinstance(error, BoosterError) or not isinstance(error, OSError):
        return error
    failure = CheckpointError(f"{action_name} failed: {error}. Check the path, its permissions and the free space")
    failure.__cause__ = error
    return failure
