"""Which ranks share shards and which hold copies of them: process groups and meshes as users give them, as one mesh."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from booster.comm import gather_distinct, group_rank, mesh_of_groups, new_mesh
from booster.device import current_device
from booster.errors import ConfigError

__all__ = ["AXES", "check_process_group", "describe_process_group", "groups_of", "make_mesh"]

AXES = ("replica", "shard")


def make_mesh(given: Any, device_type: str, shape: tuple[int, int]) -> DeviceMesh:
    """Returns all ranks as a mesh with the axes "replica" and "shard".

    Args:
        given: `process_group` as `check_process_group` passed it.
        device_type: Of the devices that hold the shards.
        shape: Number of replicas, and of the ranks that share one.

    Collective: every rank must call it.

    Raises:
        ConfigError: The ranks' pairs of groups are no rows and columns of one grid; on all ranks.
    """
    if isinstance(given, tuple):
        shard_group, replica_group = given
        rows = _rows_of(shard_group, replica_group)
        return mesh_of_groups([replica_group, shard_group], device_type, rows, AXES)
    if isinstance(given, DeviceMesh) and given.ndim == 2:
        groups = [given.get_group(0), given.get_group(1)]
        return mesh_of_groups(groups, device_type, given.mesh, AXES)
    # Ranks next to each other share the shards: they are likelier to be on one machine.
    mesh = new_mesh(device_type, shape, AXES)
    if given is None or given is dist.group.WORLD:
        return mesh
    # All ranks in one group: the other axis has one rank.
    whole = given.get_group() if isinstance(given, DeviceMesh) else given
    groups = [mesh.get_group(0), whole] if shape[0] == 1 else [whole, mesh.get_group(1)]
    return mesh_of_groups(groups, device_type, mesh.mesh, AXES)


def groups_of(given: Any) -> list[dist.ProcessGroup]:
    """Returns the groups that the user gave as `process_group`."""
    if isinstance(given, DeviceMesh):
        return list(given.get_all_groups())
    return list(given) if isinstance(given, tuple) else [] if given is None else [given]


def describe_process_group(given: Any) -> str:
    """Returns what ranks can compare of their groups, the members of which may differ."""
    if isinstance(given, tuple):
        return f"groups of {' and '.join(str(one.size()) for one in given)} ranks"
    if isinstance(given, DeviceMesh):
        return f"mesh of {given.mesh.tolist()}"
    return "all ranks" if given is None or given is dist.group.WORLD else "another group of all ranks"


def check_process_group(given: Any, world_size: int, *, is_hybrid: bool) -> None:
    """Raises for a `process_group` that can't be. No communication: what one rank can see.

    Args:
        given: None, a group, a pair of groups, or a mesh.
        world_size: Number of ranks.
        is_hybrid: The strategy shards over some ranks and replicates over others.

    Raises:
        ConfigError: Such a group.
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
            "process_group is a tuple of groups, which only HYBRID_SHARD divides ranks by: give one group or None, or"
            " choose HYBRID_SHARD"
        )
    if len(given) != 2 or not all(isinstance(one, dist.ProcessGroup) or _is_elsewhere(one) for one in given):
        raise ConfigError(
            f"process_group={given!r} is no pair of groups: give (shard_group, replicate_group), both with this rank"
        )
    members = [set() if _is_elsewhere(one) else set(dist.get_process_group_ranks(one)) for one in given]
    if members[0] & members[1] != {group_rank()} or len(members[0]) * len(members[1]) != world_size:
        raise ConfigError(
            f"process_group=(shard_group, replicate_group) has ranks {sorted(members[0])} and {sorted(members[1])} on"
            f" rank {group_rank()}: the two must have this rank alone in common, and their sizes make {world_size}, as"
            " checkpoints and agreements take in all ranks. Give such a pair, or extra_dp_size= in its place"
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
            f"process_group={given!r} is a mesh of {given.device_type} devices, and weights are on {current_device()}:"
            f" make it for {current_device().type!r}"
        )
    _check_all_ranks(given.mesh.flatten().tolist(), world_size)
    lines = [*given.mesh.tolist(), *given.mesh.T.tolist()] if ndim == 2 else [given.mesh.tolist()]
    if any(line != sorted(line) for line in lines):
        raise ConfigError(
            f"process_group is a mesh of ranks {given.mesh.tolist()}, and torch numbers the ranks of its groups in"
            " ascending order, so that shards would be mixed up: give a mesh that ascends along each dimension"
        )


def _check_one_group(given: Any, world_size: int, *, is_hybrid: bool) -> None:
    if not isinstance(given, dist.ProcessGroup) and not _is_elsewhere(given):
        raise ConfigError(
            f"process_group={given!r} is no group of ranks: give a ProcessGroup, for HYBRID_SHARD a pair of them or a"
            " DeviceMesh with two dimensions, or leave it out for all ranks"
        )
    _check_all_ranks([] if _is_elsewhere(given) else dist.get_process_group_ranks(given), world_size)
    if is_hybrid and given is not dist.group.WORLD:
        raise ConfigError(
            "process_group is one group, and HYBRID_SHARD divides the ranks in two ways: give (shard_group,"
            " replicate_group), a DeviceMesh with two dimensions, or leave it out and give extra_dp_size="
        )


def _check_all_ranks(ranks: list[int], world_size: int) -> None:
    if sorted(ranks) != list(range(world_size)):
        raise ConfigError(
            f"process_group has ranks {ranks} of {world_size}: checkpoints and agreements take in all ranks, so none"
            " may be left out. Leave process_group out, or start only as many ranks as should train this model"
        )


def _rows_of(shard_group: dist.ProcessGroup, replica_group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the ranks with a row for each replica, from what each rank knows of its own two groups."""
    mine = [dist.get_process_group_ranks(group) for group in (shard_group, replica_group)]
    payloads, owners = gather_distinct(json.dumps(mine).encode())
    everyone = [json.loads(payloads[owner]) for owner in owners]
    rows = sorted({tuple(shards) for shards, _ in everyone})
    columns = list(zip(*rows, strict=False))
    for rank, (shards, replicas) in enumerate(everyone):
        if tuple(replicas) not in columns or columns.index(tuple(replicas)) != shards.index(rank):
            raise ConfigError(
                f"process_group=(shard_group, replicate_group): the ranks {replicas} of rank {rank}'s replicate_group"
                f" are not at the same place in their shard groups {rows}, and would hold different shards: make groups"
                " of the rows and the columns of a grid, or give extra_dp_size= in their place"
            )
    return torch.tensor(rows)


def _is_elsewhere(given: Any) -> bool:
    """Returns whether it is what torch gives to a rank that made a group and is not in it."""
    return isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER
