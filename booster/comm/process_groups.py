"""Process groups and meshes."""

from __future__ import annotations

import gc
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]  # no __all__ there
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store, _get_default_store, _world

from booster.errors import ConfigError, RankFailedError, first_line, format_ranks
from booster.fault_tolerance.failure_diagnosis import format_phase, name_group
from booster.fault_tolerance.progress import current_progress
from booster.fault_tolerance.store import TimeoutStore, call_with_timeout
from booster.fault_tolerance.timeouts import CHANGEABLE_BACKENDS, current_timeout, register_group, timeouts

from .fake import is_fake_world
from .shared_memory import release_shared_memory

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

_tracked: WeakSet[dist.ProcessGroup] = WeakSet()  # destroyed once they are unused
_for_hosts: WeakSet[dist.ProcessGroup] = WeakSet()  # made with gloo beside the device's backend
_num_splits: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # by world
_released: WeakSet[dist.ProcessGroup] = WeakSet()
# Every mesh and its groups, as torch's mesh may hold their names only.
_mesh_groups: dict[object, tuple[ref[DeviceMesh], list[dist.ProcessGroup]]] = {}
_num_to_collect = _MIN_GROUPS_TO_COLLECT


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
    # Before 2.13 torch never frees a mesh that a parameter was divided by: its groups are taken from it.
    for mesh, held in list(_mesh_groups.values()):
        held[:] = [group for group in held if group not in _released]
        registry: dict[str, dist.ProcessGroup] = getattr(mesh(), "_pg_registry", {})
        for name in [name for name, group in registry.items() if group in _released]:
            del registry[name]
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
        needs_no_other_rank = group not in _world.pg_map or str(dist.get_backend(group)) == "gloo"
        if num_references <= _BASE_REFERENCES + _num_table_entries(group) and needs_no_other_rank:
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

    abort = shutdown


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
        from torch.distributed.tensor import _collective_utils, debug

        debug._clear_python_sharding_prop_cache()  # torch 2.10 has no name for both
        debug._clear_fast_path_sharding_prop_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()  # costs of redistribution, holds the groups


_CONNECTION_ERROR = re.compile(r"timed? ?out|connect|closed|reset by peer|broken pipe|socket", re.IGNORECASE)
_ANSWER_SECONDS = 3.0  # of the store

_num_created: WeakKeyDictionary[Store, Counter[str]] = WeakKeyDictionary()  # by the store of a world and the ranks


def new_group(
    ranks: Sequence[int], backend: str | None = None, *, use_local_synchronization: bool = False
) -> dist.ProcessGroup | None:
    """Return a new process group, or None on a rank outside of it.

    Args:
        ranks: Global ranks.
        backend: Backend name, optional; defaults to the world's.
        use_local_synchronization: If True, only the ranks of the group call this.

    Collective over the world, or over `ranks` with `use_local_synchronization`.

    Raises:
        RankFailedError: A rank did not call it within the set-up timeout.
    """
    is_for_host = backend == "gloo"
    backend = None if is_fake_world() else backend
    expected = list(ranks) if use_local_synchronization else list(range(dist.get_world_size()))
    arrivals = _Arrivals(ranks, expected)
    backend_name = str(dist.get_backend()) if backend is None else backend
    is_known = all(part.split(":")[-1] in CHANGEABLE_BACKENDS for part in backend_name.split(","))
    is_changeable = is_known and get_debug_level() != DebugLevel.DETAIL
    seconds = timeouts().setup if is_changeable else current_timeout()

    def make() -> dist.ProcessGroup | int | None:
        with _no_split() if backend == "gloo" else nullcontext():
            made: dist.ProcessGroup | int | None = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=seconds),
                backend=backend,
                use_local_synchronization=use_local_synchronization,
            )
        return made

    try:
        arrivals.record(seconds)
        # torch waits in the store, see Note [Store timeouts]. An accelerator's backend needs the device of this thread.
        group = call_with_timeout(make, seconds + _ANSWER_SECONDS) if backend_name == "gloo" else make()
    except RuntimeError as error:
        if not isinstance(error, (dist.DistStoreError, dist.DistNetworkError)) and not _CONNECTION_ERROR.search(
            str(error)
        ):
            raise
        raise RankFailedError(arrivals.explanation(seconds, error)) from error
    if not isinstance(group, dist.ProcessGroup):  # torch's value for ranks outside of the group
        return None
    if is_for_host:
        _for_hosts.add(group)
    return _track(group)


@contextmanager
def _no_split() -> Iterator[None]:
    """Make groups of gloo in the block without splits of nccl's communicator.

    Beside an nccl world with a bound device, torch lets the ranks outside of a group of gloo take part in a split, its
    members not, and those of another number of groups wait for ever (pytorch issue 145376).
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def num_communicators() -> int:
    """Return the number of this rank's groups of several ranks for its device's tensors, the world's included.

    With nccl each is a communicator, with buffers in device memory. No communication.
    """
    return sum(dist.get_world_size(group) > 1 and group not in _for_hosts for group in list(_world.pg_map))


def keep_with_world(group: dist.ProcessGroup) -> None:
    """Keep a group of this package until the world is destroyed. No communication."""
    _tracked.discard(group)


def new_groups(rows: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Make a group of each row of global ranks and return this rank's, or None on a rank outside of all.

    Args:
        rows: Global ranks of each group; no rank is in two of them.
        backend: Backend name, optional; defaults to the world's.

    Collective over the world. Raises as `new_group` does.
    """
    if backend is None and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # torch splits nccl's communicator into all rows at once; rows made one by one would be one split each.
        number = _next_split_number()
        made = dist.split_group(None, [sorted(row) for row in rows], timeout=timedelta(seconds=timeouts().setup))
        mine = [] if made is None else [_track_split(made, f"split {number}")]
    else:
        mine = [group for row in rows if (group := new_group(row, backend)) is not None]
    if len(mine) > 1:
        raise AssertionError(f"rank {dist.get_rank()} is in {len(mine)} of the groups {rows}")
    return mine[0] if mine else None


def new_group_of_rows(rows: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
    """As `new_groups`, where every rank is in exactly one row."""
    mine = new_groups(rows, backend)
    if mine is None:
        raise AssertionError(f"rank {dist.get_rank()} is in none of the groups {rows}")
    return mine


def _next_split_number() -> int:
    """Return the number of a split of the world, the same on all ranks, whose counts of groups may differ."""
    world = dist.group.WORLD
    assert world is not None
    _num_splits[world] = _num_splits.get(world, 0) + 1
    return _num_splits[world]


def _track_split(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    name_group(group, f"{name} from {min(dist.get_process_group_ranks(group))}")
    return _track(group)


def _track(group: dist.ProcessGroup) -> dist.ProcessGroup:
    register_group(group)
    _tracked.add(group)
    return group


def new_mesh(device_type: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return a mesh of all ranks, consecutive along its last axis. An axis with all ranks is the world.

    Args:
        device_type: Device type of the ranks, such as "cpu".
        shape: Number of ranks along each axis.
        names: Names of the axes.

    Collective over the world. Raises as `new_group` does.

    Raises:
        ConfigError: There is no process group.
    """
    world = dist.group.WORLD if dist.is_available() else None
    if world is None:
        raise ConfigError(
            f"a mesh of {' x '.join(map(str, shape))} ranks needs a process group, and there is none: call"
            " booster.launch_from_torch() first"
        )
    if getattr(world, "bound_device_id", None) is not None:
        # torch splits nccl's communicator into all rows at once; rows made one by one would be one split each.
        number = _next_split_number()
        mesh = init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))
        for name, group in zip(names, mesh.get_all_groups(), strict=True):
            if group is not world:
                _track_split(group, f"mesh {number} {name}")
        _keep_groups(mesh, mesh.get_all_groups())
        return mesh
    places = torch.arange(math.prod(shape)).view(*shape)
    groups = [
        world if size == world.size() else new_group_of_rows(places.movedim(axis, -1).reshape(-1, size).tolist())
        for axis, size in enumerate(shape)
    ]
    return mesh_of_groups(groups, device_type, places, names)


def mesh_of_groups(
    groups: Sequence[dist.ProcessGroup], device_type: str, ranks: torch.Tensor, names: Sequence[str]
) -> DeviceMesh:
    """Return a mesh of existing groups. No communication.

    Args:
        groups: This rank's group along each axis.
        device_type: Device type of the ranks, such as "cpu".
        ranks: Global ranks, in the shape of the mesh.
        names: Names of the axes.
    """
    mesh = DeviceMesh.from_group(list(groups), device_type, ranks, mesh_dim_names=tuple(names))
    _keep_groups(mesh, groups)
    return mesh


def _keep_groups(mesh: DeviceMesh, groups: Sequence[dist.ProcessGroup]) -> None:
    mark = object()  # meshes of equal ranks compare equal
    _mesh_groups[mark] = (ref(mesh), list(groups))
    finalize(mesh, _mesh_groups.pop, mark).atexit = False


class _Arrivals:
    """Record of the ranks that started to make a group, for the error where it fails."""

    def __init__(self, ranks: Sequence[int], expected: Sequence[int]) -> None:
        self._ranks, self._expected = ranks, expected
        store = _get_default_store()
        made = _num_created.setdefault(store, Counter())
        key = ",".join(map(str, ranks))
        made[key] += 1
        self._client, self._prefix = store, f"booster.groups/{key}/{made[key]}"

    def record(self, seconds: float) -> None:
        """Record this rank in the store, with a timeout in seconds."""
        if str(dist.get_backend()) != "fake":  # torch's fake backend has a fake store
            TimeoutStore(self._client, self._prefix, seconds).set(str(dist.get_rank()), "here")

    def explanation(self, seconds: float, error: RuntimeError) -> str:
        phase = format_phase(current_progress()) or " (in set-up, outside of all phases)"
        head = (
            f"rank {dist.get_rank()} could not make a group of {format_ranks(self._ranks)} within {seconds:g} s{phase}"
        )
        tail = f"torch reports: {first_line(error)}"
        try:
            store = TimeoutStore(self._client, self._prefix, _ANSWER_SECONDS)
            missing = [rank for rank in self._expected if not store.check([str(rank)])]
        except dist.DistError:
            return (
                f"{head}, and the store of torch.distributed is gone: the process that serves it (rank 0 or the"
                f" launcher) has ended or is stopped, see its log; {tail}"
            )
        if not missing:
            return f"{head}: all had arrived, and one has ended or hangs since: see their logs; {tail}"
        return (
            f"{head}: {format_ranks(missing)} did not arrive: see the log there, whether it ended, hangs or runs"
            f" something else. If it needs longer, launch with setup_timeout_seconds=...; {tail}"
        )
