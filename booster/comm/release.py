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

__all__ = ["check_not_released", "release_groups", "release_unused_groups", "track_group"]

# Note [Unused groups]
# A group has threads, connections and memory until its last reference is dropped, and torch's tables hold one for ever.
# All users of a group refer to it: models by their hooks, optimizers, meshes, operations in flight. So a group that
# only the tables refer to is unused, and is removed from them. References are counted by the interpreter, so holders of
# a group need no code for it; a table unknown here keeps a group too long, never too short.
# Unused groups are destroyed when a plugin is made: the garbage collector may run anywhere. Ranks collect garbage at
# different times, so nothing is communicated, and only groups of backends whose destruction needs no other rank are
# destroyed. Nccl destroys its communicators together with the other ranks: only `release_groups`, which all ranks call
# for the same groups, releases those.
# Torch names some groups by their count. A name must not be used twice, as the addresses of the first group are in the
# store, and must be equal on all ranks: released groups stay counted.

_MIN_GROUPS_TO_COLLECT = 16  # the garbage collector is not run for fewer groups

_tracked: WeakSet[dist.ProcessGroup] = WeakSet()
_released: WeakSet[dist.ProcessGroup] = WeakSet()
_num_to_collect = _MIN_GROUPS_TO_COLLECT


def track_group(group: dist.ProcessGroup) -> None:
    """Register a group to be destroyed once it is unused. No communication."""
    _tracked.add(group)


def release_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Destroy those of the groups that this package has made; None and others are skipped.

    No operation may be in flight there. Later uses raise `ConfigError`. Threads and connections end with the last
    reference to a group. Every rank calls it, with the same groups in the same order; no communication but the
    backend's.
    """
    for group in groups:
        if group is not None and group in _tracked:
            _released.add(group)
            _destroy(group)
    _forget_meshes()


def release_unused_groups() -> None:
    """Destroy unused groups; see Note [Unused groups]. No communication."""
    global _num_to_collect
    if not _tracked:
        return
    _forget_meshes()
    collects = len(_tracked) >= _num_to_collect
    if collects:
        gc.collect()
    left = list(_tracked)
    while left:
        group, num_references = _take_last(left)
        if num_references <= _BASE_REFERENCES + _num_table_entries(group) and _can_destroy_locally(group):
            _destroy(group)
    if collects:
        _num_to_collect = max(_MIN_GROUPS_TO_COLLECT, 2 * len(_tracked))


def check_not_released(group: dist.ProcessGroup | None) -> None:
    """Raise `ConfigError` if a group was released by `release_groups`."""
    if group is not None and group in _released:
        raise ConfigError(
            "this communicates in a process group that Booster.close() has released: close the Booster when nothing"
            " that it has boosted is used any more, or boost again with a new plugin"
        )


class _ReleasedName:
    """Entry of a released group in torch's table of names. Torch may shut it down once more."""

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass


def _take_last(left: list[Any]) -> tuple[Any, int]:
    one = left.pop()
    return one, sys.getrefcount(one)


_BASE_REFERENCES = _take_last([object()])[1]  # an object without other references


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


def _can_destroy_locally(group: dist.ProcessGroup) -> bool:
    return group not in _world.pg_map or str(dist.get_backend(group)) == "gloo"


def _destroy(group: dist.ProcessGroup) -> None:
    _tracked.discard(group)
    release_shared_memory(group)
    if group in _world.pg_map:  # not if the user has destroyed it, or the world
        name = _world.pg_names[group]
        dist.destroy_process_group(group)
        names: dict[Any, str] = _world.pg_names  # type: ignore[assignment]
        names[_ReleasedName()] = name


def _forget_meshes() -> None:
    # torch caches sharding decisions by mesh, and meshes of other groups of the same ranks compare equal
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
