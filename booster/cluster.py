"""Who this process is among the ranks, and doing things on some of them or in turns."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from booster.argument_checks import is_whole_number
from booster.comm import barrier, group_rank, group_size, is_initialized, raise_on_all_ranks
from booster.errors import ConfigError
from booster.launch import launched_local_rank, leave

__all__ = ["DistCoordinator"]

P = ParamSpec("P")
R = TypeVar("R")


class DistCoordinator:
    """Answers which rank this is and coordinates ranks. Where nothing was launched it is a world of one.

    Example:
        >>> coordinator = DistCoordinator()
        >>> if coordinator.is_master():
        ...     print(coordinator.world_size)
        1

    Raises:
        ConfigError: A launcher started several processes and none of the `booster.launch...` functions was called.
    """

    def __init__(self) -> None:
        _check_launched()

    @property
    def rank(self) -> int:
        """This process's number in the world."""
        _check_launched()
        return group_rank()

    @property
    def world_size(self) -> int:
        """Number of processes in the world."""
        _check_launched()
        return group_size()

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        local_rank = launched_local_rank()
        if local_rank is not None:
            return local_rank
        stated = os.environ.get("LOCAL_RANK", "")
        return int(stated) if is_initialized() and stated.isdigit() else self.rank

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Returns whether this is the first rank of the group (None: of the world)."""
        _check_launched()
        return group_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Returns whether this is the first rank on its machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Returns whether this is the last rank of the group (None: of the world)."""
        _check_launched()
        return group_rank(process_group) == group_size(process_group) - 1

    def print_on_master(self, msg: object, process_group: dist.ProcessGroup | None = None) -> None:
        """Prints on the first rank of the group (None: of the world). No communication."""
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: object) -> None:
        """Prints on the first rank of every machine. No communication."""
        if self.is_node_master():
            print(msg, flush=True)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Runs the block on one rank first, then on all others: the first one downloads, the others find the file.

        Where the block fails on the first rank, all others raise an error that says so, without running it.
        Collective: every rank of the group must enter it.

        Args:
            executor_rank: Rank in the group that goes first.
            process_group: The group; None for the world.

        Raises:
            ConfigError: The group has no such rank.
            RankFailedError: The block failed on the first rank (or the same class, where that was this library's).
        """
        size = group_size(process_group)
        if not is_whole_number(executor_rank) or not 0 <= executor_rank < size:
            raise ConfigError(
                f"executor_rank={executor_rank!r} is outside of a group of {size}: choose 0 .. {size - 1}"
            )
        _check_launched()
        if group_rank(process_group) != executor_rank:
            raise_on_all_ranks(None, process_group)
            yield
            return
        try:
            yield
        except Exception as error:
            raise_on_all_ranks(error, process_group)
            raise
        raise_on_all_ranks(None, process_group)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Waits until every rank of the group (None: the world) is here, at most for the launch's timeout. Collective.

        Raises:
            RankFailedError: A rank died or did not come in time: the message names it.
        """
        _check_launched()
        barrier(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Returns a decorator: the function runs on the group's first rank; on the others it returns None at once."""

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            @functools.wraps(function)
            def on_master(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return on_master

        return decorate

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Destroys the group, or the whole world for None, after which a new launch is possible.

        Collective: every rank of the group must call it. Does nothing where nothing was launched.
        """
        if process_group is None:
            leave()
        elif is_initialized():
            dist.destroy_process_group(process_group)


def _check_launched() -> None:
    if is_initialized():
        return
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and world_size.isdigit() and int(world_size) > 1:
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={world_size} in the environment: a launcher started several ranks, but they were "
            "never joined, and each would think to be alone: call booster.launch_from_torch() first"
        )
