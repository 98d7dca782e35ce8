"""Rank information, and running code on selected ranks or one rank at a time."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from booster.comm import barrier, group_rank, group_size, is_initialized, raise_on_all_ranks
from booster.errors import ConfigError
from booster.validation import is_int

from .launch import destroy_world, launched_local_rank

P = ParamSpec("P")
R = TypeVar("R")


class DistCoordinator:
    """Rank information and coordination of ranks. Without a launch it is a world of one rank.

    Examples:
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
        """Global rank of this process."""
        _check_launched()
        return group_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks of the world."""
        _check_launched()
        return group_size()

    @property
    def local_rank(self) -> int:
        """Rank of this process on its host."""
        local_rank = launched_local_rank()
        if local_rank is not None:
            return local_rank
        stated = os.environ.get("LOCAL_RANK", "")
        return int(stated) if is_initialized() and stated.isdigit() else self.rank

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the first rank of the group, by default of the world."""
        _check_launched()
        return group_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return whether this is the first rank on its host."""
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the last rank of the group, by default of the world."""
        _check_launched()
        return group_rank(process_group) == group_size(process_group) - 1

    def print_on_master(self, msg: object, process_group: dist.ProcessGroup | None = None) -> None:
        """Print on the first rank of the group, by default of the world. No communication."""
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: object) -> None:
        """Print on the first rank of every host. No communication."""
        if self.is_node_master():
            print(msg, flush=True)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Run the block on one rank first, then on all others, for downloads into a shared cache.

        If the block fails on the first rank, all others raise without running it.
        Collective: every rank of the group must enter it.

        Args:
            executor_rank: Rank in the group that runs first.
            process_group: Process group, optional; defaults to the world.

        Raises:
            ConfigError: The group has no such rank.
            RankFailedError: The block failed on the first rank (or an error of that class, if it is of this library).
        """
        size = group_size(process_group)
        if not is_int(executor_rank) or not 0 <= executor_rank < size:
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
        """Wait for every rank of the group, by default the world, at most for the training timeout. Collective.

        Raises:
            RankFailedError: A rank died or is too late: the message names it.
        """
        _check_launched()
        barrier(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Return a decorator: the function runs on the group's first rank and returns None at once on the others."""

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            @functools.wraps(function)
            def on_master(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return on_master

        return decorate

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Destroy the group, by default the world, after which a new launch is possible.

        Collective: every rank of the group must call it. Does nothing without a launch.
        """
        if process_group is None:
            destroy_world()
        elif is_initialized():
            dist.destroy_process_group(process_group)


def _check_launched() -> None:
    if is_initialized():
        return
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and world_size.isdigit() and int(world_size) > 1:
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={world_size} in the environment: a launcher started several ranks, but there is "
            "no process group, and each would run alone: call booster.launch_from_torch() first"
        )
