"""Process groups and meshes, and the timeouts of their collectives."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]  # no __all__ there
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store, _get_default_store

from booster.comm.bounded_store import TimeoutStore, call_with_timeout
from booster.comm.inquiry import format_phase, format_ranks
from booster.comm.release import track_group
from booster.comm.shared_memory import set_shared_memory_timeout
from booster.errors import ConfigError, RankFailedError
from booster.phases import current_progress
from booster.time_limits import timeouts

__all__ = [
    "current_timeout",
    "mesh_of_groups",
    "new_group",
    "new_group_of_rows",
    "new_mesh",
    "p2p_timeout",
    "register_world",
    "timeout_scope",
]

# Note [Timeouts]
# A rank that is lost in training should be detected soon; a rank that compiles a kernel, reads a model or writes a
# large shard needs more time. So the launch takes three timeouts. Groups made here, and the world if the launch made
# it, have the training timeout, and inside of `timeout_scope` the set-up or checkpoint timeout: the timeouts of their
# backends are changed at entry and restored at exit, which costs a microsecond per group. The innermost `timeout_scope` of
# the process applies. Groups of the user, and an adopted world, keep their timeouts.
# A gloo message has the timeout that its connection was made with, unless its wait is given another one. A group is
# created with the set-up timeout. TORCH_DISTRIBUTED_DEBUG=DETAIL puts a barrier before each collective, whose timeout
# cannot be changed later: there, and with a backend other than gloo and nccl, a group keeps its timeout.

Kind = Literal["setup", "checkpoint"]

_CHANGEABLE = ("gloo", "nccl")
_CONNECTION_ERROR = re.compile(r"timed? ?out|connect|closed|reset by peer|broken pipe|socket", re.IGNORECASE)
_ANSWER_SECONDS = 3.0  # of the store


@dataclass(slots=True)
class _TimeoutGroup:
    """Group with a changeable timeout, and its backends."""

    backends: list[Any]
    is_gloo: bool = False

    def __post_init__(self) -> None:
        self.is_gloo = bool(self.backends) and all(backend.name() == "gloo" for backend in self.backends)


_timeout_groups: WeakKeyDictionary[dist.ProcessGroup, _TimeoutGroup] = WeakKeyDictionary()
_kinds: list[Kind] = []  # of the active `timeout_scope` blocks of this process, outermost first
_lock = threading.RLock()
_num_created: WeakKeyDictionary[Store, Counter[str]] = WeakKeyDictionary()  # by the store of a world and the ranks


def current_timeout() -> float:
    """Return the timeout of waits that start now."""
    return getattr(timeouts(), _kinds[-1]) if _kinds else timeouts().training


@contextmanager
def timeout_scope(kind: Kind) -> Iterator[None]:
    """Use the `setup` or `checkpoint` timeout for collectives started in this block. Also a decorator.

    Applies to all threads of this process. No communication. See Note [Timeouts].
    """
    with _lock:
        _kinds.append(kind)
        _apply_to_all()
    try:
        yield
    finally:
        with _lock:
            _remove_last(kind)
            _apply_to_all()


def p2p_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout for the wait of a message in this group, or None for the backend's.

    Waits for nccl's messages do not block: they are enqueued on the device's stream.
    """
    chosen = group or dist.group.WORLD
    timeout_group = None if chosen is None else _timeout_groups.get(chosen)
    return timedelta(seconds=current_timeout()) if timeout_group is not None and timeout_group.is_gloo else None


def register_world() -> None:
    """Apply the timeouts of this module to the world, which the launch has made. No communication."""
    if dist.group.WORLD is not None:
        _register(dist.group.WORLD)


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
    expected = list(ranks) if use_local_synchronization else list(range(dist.get_world_size()))
    arrivals = _Arrivals(ranks, expected)
    is_changeable = _has_changeable_timeout(str(dist.get_backend()) if backend is None else backend)
    seconds = timeouts().setup if is_changeable else current_timeout()
    is_by_gloo = str(dist.get_backend() if backend is None else backend) == "gloo"

    def make() -> dist.ProcessGroup | int | None:
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
        group = call_with_timeout(make, seconds + _ANSWER_SECONDS) if is_by_gloo else make()
    except RuntimeError as error:
        if not isinstance(error, (dist.DistStoreError, dist.DistNetworkError)) and not _CONNECTION_ERROR.search(
            str(error)
        ):
            raise
        raise RankFailedError(arrivals.explanation(seconds, error)) from error
    if not isinstance(group, dist.ProcessGroup):  # torch's value for ranks outside of the group
        return None
    _register(group)
    track_group(group)
    return group


def new_group_of_rows(rows: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a group of each row of global ranks and return this rank's. Every rank is in exactly one row.

    Collective over the world. Raises as `new_group` does.
    """
    mine = [group for row in rows if (group := new_group(row)) is not None]
    if len(mine) != 1:
        raise AssertionError(f"rank {dist.get_rank()} is in {len(mine)} of the groups {rows}")
    return mine[0]


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
        mesh = init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))
        for group in mesh.get_all_groups():
            if group is not world:
                _register(group)
                track_group(group)
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
    # Torch's mesh may hold names of its groups only: the mesh keeps the groups alive.
    finalize(mesh, list, groups).atexit = False
    return mesh


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
            self._under(seconds).set(str(dist.get_rank()), "here")

    def _under(self, seconds: float) -> TimeoutStore:
        return TimeoutStore(self._client, self._prefix, seconds)

    def explanation(self, seconds: float, error: RuntimeError) -> str:
        phase = format_phase(current_progress()) or " (in set-up, outside of all phases)"
        head = (
            f"rank {dist.get_rank()} could not make a group of {format_ranks(self._ranks)} within {seconds:g} s{phase}"
        )
        tail = f"torch reports: {str(error).strip().splitlines()[0]}"
        try:
            store = self._under(_ANSWER_SECONDS)
            missing = [rank for rank in self._expected if not store.check([str(rank)])]
        except dist.DistError:
            return (
                f"{head}, and the store of torch.distributed is gone: the process that serves it (rank 0 or the"
                f" launcher) has ended or is stopped, see its log; {tail}"
            )
        if not missing:
            return f"{head}: all had arrived, and one has ended or hangs since: see their logs; {tail}"
        return (
            f"{head}: {format_ranks(missing)} did not arrive: see the log there, whether it ended, hangs or runs something"
            f" else. If it needs longer, launch with setup_timeout_seconds=...; {tail}"
        )


def _has_changeable_timeout(backend: str) -> bool:
    is_known = all(part.split(":")[-1] in _CHANGEABLE for part in backend.split(","))
    return is_known and get_debug_level() != DebugLevel.DETAIL


def _register(group: dist.ProcessGroup) -> None:
    with _lock:
        _timeout_groups[group] = _TimeoutGroup(_changeable_backends(group))
        _apply(group)


def _changeable_backends(group: dist.ProcessGroup) -> list[Any]:
    backends: list[Any] = []
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # inside of the wrapper of torch's debug mode
        if backend.name() in _CHANGEABLE and not any(backend is other for other in backends):
            backends.append(backend)
    return backends


def _apply_to_all() -> None:
    for group in list(_timeout_groups):
        _apply(group)


def _apply(group: dist.ProcessGroup) -> None:
    seconds = current_timeout()
    for backend in _timeout_groups[group].backends:
        backend._set_default_timeout(timedelta(seconds=seconds))
    set_shared_memory_timeout(group, seconds)


def _remove_last(kind: Kind) -> None:
    # not simply the last one: another thread may have entered a block since
    index = len(_kinds) - 1 - _kinds[::-1].index(kind)
    del _kinds[index]
