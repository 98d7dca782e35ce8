"""Destruction of process groups: those without references, and those of a plugin that is closed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from booster.comm.shared_memory import release_shared_memory
from booster.errors import ConfigError

__all__ = ["note_made", "release_groups", "release_unused_groups", "require_not_released"]

# Note [Unused groups]
# A group has threads, connections and memory until its last reference goes, and torch's tables keep one for ever. Who
# else uses a group refers to it: models by their hooks, optimizers, meshes, operations in flight. So one that only the
# tables refer to is unused, and leaves them. References are counted, not announced, so nothing that holds a
# group has to take part; and a table that is not known here keeps a group too long, never too short.
# That happens where a plugin is made, as the garbage collector may run inside of anything. Ranks collect garbage at
# different times, so nothing is communicated there; and only groups of backends that need no other rank to end are
# given back so. Nccl's ends its communicators together with the other ranks: `release_groups` alone gives those back,
# which all ranks call for the same groups.
# Torch names some groups by how many there are. A name must not come a second time, as the first one's addresses are in
# the store, and must be the same on all ranks: what is given back goes on counting.

_FEWEST_TO_COLLECT = 16  # so few groups are no reason to run the garbage collector

_made: WeakSet[dist.ProcessGroup] = WeakSet()
_released: WeakSet[dist.ProcessGroup] = WeakSet()
_num_to_collect = _FEWEST_TO_COLLECT


def note_made(group: dist.ProcessGroup) -> None:
    """Registers a group to be destroyed once it is unused. No communication."""
    _made.add(group)


def release_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Gives back those of the groups that this package has made; None and others are left out.

    No operation may be in flight there. What uses one of them later raises a `ConfigError`. Threads and connections end
    with the last reference to a group. Every rank calls it, with the same groups in the same order; no communication
    but that of the backend.
    """
    for group in groups:
        if group is not None and group in _made:
            _released.add(group)
            _destroy(group)
    _forget_meshes()


def release_unused_groups() -> None:
    """Destroys unused groups; see Note [Unused groups]. No communication."""
    global _num_to_collect
    if not _made:
        return
    _forget_meshes()
    collects = len(_made) >= _num_to_collect
    if collects:
        gc.collect()
    left = list(_made)
    while left:
        group, num_references = _take_last(left)
        if num_references <= _NUM_REFERENCES_OF_ONE + _num_table_entries(group) and _ends_alone(group):
            _destroy(group)
    if collects:
        _num_to_collect = max(_FEWEST_TO_COLLECT, 2 * len(_made))


def require_not_released(group: dist.ProcessGroup | None) -> None:
    """Raises if a group was given back by `release_groups`.

    Raises:
        ConfigError: It was.
    """
    if group is not None and group in _released:
        raise ConfigError(
            "this communicates in a group of ranks that Booster.close() has given back: close the Booster when nothing"
            " that it has boosted is used any more, or boost again with a new plugin"
        )


class _NameOfReleased:
    """Keeps the name of a group that was given back in torch's table of names. Torch may want to end it once more."""

    def shutdown(self) -> None:
        """Does nothing."""

    def abort(self) -> None:
        """Does nothing."""


def _take_last(left: list[Any]) -> tuple[Any, int]:
    one = left.pop()
    return one, sys.getrefcount(one)


_NUM_REFERENCES_OF_ONE = _take_last([object()])[1]  # an object without other references


def _num_table_entries(group: dist.ProcessGroup) -> int:
    tables: tuple[Any, ...] = (
        _world.pg_map,
        _world.pg_names,
        _world.pg_group_ranks,
        _world.pg_backend_config,
        _world.pg_to_tag,
    )
    by_tag = sum(one is group for groups in _world.tags_to_pg.values() for one in groups)
    return by_tag + sum(group in table for table in tables)


def _ends_alone(group: dist.ProcessGroup) -> bool:
    return group not in _world.pg_map or str(dist.get_backend(group)) == "gloo"


def _destroy(group: dist.ProcessGroup) -> None:
    _made.discard(group)
    release_shared_memory(group)
    if group in _world.pg_map:  # it is not where the user has destroyed it, or its world
        name = _world.pg_names[group]
        dist.destroy_process_group(group)
        names: dict[Any, str] = _world.pg_names  # type: ignore[assignment]
        names[_NameOfReleased()] = name


def _forget_meshes() -> None:
    """Lets torch forget what it knows of operations on meshes: meshes of other groups of the same ranks are equal."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
