"""The argument `process_group`: validation, and the mesh of shards and replicas that it describes."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from booster.comm import all_gather_bytes, group_rank, mesh_of_groups, new_mesh
from booster.device import current_device
from booster.errors import ConfigError

AXES = ("replica", "shard")


def make_mesh(given: Any, device_type: str, shape: tuple[int, int]) -> DeviceMesh:
    """Return all ranks as a mesh with the axes "replica" and "shard".

    Args:
        given: Argument `process_group`, valid for `check_process_group`.
        device_type: Type of the devices that hold the shards.
        shape: Sizes of the two axes.

    Collective: every rank must call it.

    Raises:
        ConfigError: The pairs of groups are not the rows and columns of one grid; on all ranks.
    """
    if isinstance(given, tuple):
        shard_group, replica_group = given
        rows = _rows_of(shard_group, replica_group)
        return mesh_of_groups([replica_group, shard_group], device_type, rows, AXES)
    if isinstance(given, DeviceMesh) and given.ndim == 2:
        groups = [given.get_group(0), given.get_group(1)]
        return mesh_of_groups(groups, device_type, given.mesh, AXES)
    # Adjacent ranks form a shard group, as they are more likely to be on one host.
    mesh = new_mesh(device_type, shape, AXES)
    if given is None or given is dist.group.WORLD:
        return mesh
    # A group of all ranks: the other axis has size 1.
    group = given.get_group() if isinstance(given, DeviceMesh) else given
    groups = [mesh.get_group(0), group] if shape[0] == 1 else [group, mesh.get_group(1)]
    return mesh_of_groups(groups, device_type, mesh.mesh, AXES)


def groups_of(given: Any) -> list[dist.ProcessGroup]:
    """Return the groups in the argument `process_group`."""
    if isinstance(given, DeviceMesh):
        return list(given.get_all_groups())
    return list(given) if isinstance(given, tuple) else [] if given is None else [given]


def describe_process_group(given: Any) -> str:
    """Return a description of `process_group` that is equal on all ranks if the arguments are consistent."""
    if isinstance(given, tuple):
        return f"groups of {' and '.join(str(one.size()) for one in given)} ranks"
    if isinstance(given, DeviceMesh):
        return f"mesh of {given.mesh.tolist()}"
    return "all ranks" if given is None or given is dist.group.WORLD else "another group of all ranks"


def check_process_group(given: Any, world_size: int, *, is_hybrid: bool) -> None:
    """Validate the argument `process_group`, without communication.

    Args:
        given: None, a group, a pair of groups, or a mesh.
        world_size: Number of ranks.
        is_hybrid: If True, the strategy is a HYBRID_SHARD.

    Raises:
        ConfigError: It is invalid.
    """
    if isinstance(given, tuple):
        _check_pair(given, world_size, is_hybrid=is_hybrid)
    elif isinstance(given, DeviceMesh):
        _check_mesh(given, world_size, is_hybrid=is_hybrid)
    elif given is not None:
        _check_one_group(given, world_size, is_hybrid=is_hybrid)


def _check_pair(given: tuple[Any, ...], world_size: int, *, is_hybrid: bool) -> None:
    if not is_hybrid:
        raise ConfigError(
            "process_group is a tuple of groups, which only HYBRID_SHARD takes: give one group or None, or choose"
            " HYBRID_SHARD"
        )
    if len(given) != 2 or not all(isinstance(one, dist.ProcessGroup) or _is_non_member(one) for one in given):
        raise ConfigError(
            f"process_group={given!r} is not a pair of groups: give (shard_group, replicate_group), both with this rank"
        )
    members = [set() if _is_non_member(one) else set(dist.get_process_group_ranks(one)) for one in given]
    if members[0] & members[1] != {group_rank()} or len(members[0]) * len(members[1]) != world_size:
        raise ConfigError(
            f"process_group=(shard_group, replicate_group) has ranks {sorted(members[0])} and {sorted(members[1])} on"
            f" rank {group_rank()}: the two must have this rank alone in common, and their sizes make {world_size},"
            " because checkpoints involve all ranks. Give such a pair, or extra_dp_size= instead"
        )


def _check_mesh(given: DeviceMesh, world_size: int, *, is_hybrid: bool) -> None:
    ndim = 2 if is_hybrid else 1
    if given.ndim != ndim:
        raise ConfigError(
            f"process_group={given!r} has {given.ndim} dimensions: HYBRID_SHARD takes a mesh of two, which replicate"
            " and shard, and the other strategies one of one dimension"
        )
    if given.device_type != current_device().type:
        raise ConfigError(
            f"process_group={given!r} is a mesh of {given.device_type} devices, but the weights are on"
            f" {current_device()}: make it for {current_device().type!r}"
        )
    _check_all_ranks(given.mesh.flatten().tolist(), world_size)
    lines = [*given.mesh.tolist(), *given.mesh.T.tolist()] if ndim == 2 else [given.mesh.tolist()]
    if any(line != sorted(line) for line in lines):
        raise ConfigError(
            f"process_group is a mesh of ranks {given.mesh.tolist()}, and torch numbers the ranks of its groups in"
            " ascending order, so that shards would be mixed up: give a mesh that ascends along each dimension"
        )


def _check_one_group(given: Any, world_size: int, *, is_hybrid: bool) -> None:
    if not isinstance(given, dist.ProcessGroup) and not _is_non_member(given):
        raise ConfigError(
            f"process_group={given!r} is not a process group: give a ProcessGroup, for HYBRID_SHARD a pair of them or a"
            " DeviceMesh with two dimensions, or leave it out for all ranks"
        )
    _check_all_ranks([] if _is_non_member(given) else dist.get_process_group_ranks(given), world_size)
    if is_hybrid and given is not dist.group.WORLD:
        raise ConfigError(
            "process_group is one group, but HYBRID_SHARD needs two: give (shard_group, replicate_group), a DeviceMesh"
            " with two dimensions, or leave it out and give extra_dp_size="
        )


def _check_all_ranks(ranks: list[int], world_size: int) -> None:
    if sorted(ranks) != list(range(world_size)):
        raise ConfigError(
            f"process_group has ranks {ranks} of {world_size}: checkpoints involve all ranks, so none may be left out."
            " Leave process_group out, or start only as many ranks as should train this model"
        )


def _rows_of(shard_group: dist.ProcessGroup, replica_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ranks as a matrix with one row per replica, gathered from each rank's two groups."""
    mine = [dist.get_process_group_ranks(group) for group in (shard_group, replica_group)]
    texts, owners = all_gather_bytes(json.dumps(mine).encode())
    everyone = [json.loads(texts[owner]) for owner in owners]
    rows = sorted({tuple(shards) for shards, _ in everyone})
    columns = list(zip(*rows, strict=False))
    for rank, (shards, replicas) in enumerate(everyone):
        if tuple(replicas) not in columns or columns.index(tuple(replicas)) != shards.index(rank):
            raise ConfigError(
                f"process_group=(shard_group, replicate_group): the ranks {replicas} of rank {rank}'s replicate_group"
                f" have different indices in their shard groups {rows}, and would hold different shards: make groups"
                " of the rows and the columns of a grid, or give extra_dp_size= instead"
            )
    return torch.tensor(rows)


def _is_non_member(given: Any) -> bool:
    """Return whether `given` is torch's placeholder for a group that this rank is not a member of."""
    return isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER
