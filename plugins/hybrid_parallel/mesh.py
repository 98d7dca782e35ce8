"""Which ranks work together on what: one mesh of the axes dp, pp, sp and tp, and the groups of ranks along them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from booster.comm import (
    agree,
    group_rank,
    group_size,
    new_cpu_group,
    new_group,
    new_group_of_rows,
    new_mesh,
)
from booster.errors import ConfigError

__all__ = ["AXES", "HybridMesh", "mesh_order", "rank_groups"]

# Note [Mesh axes]
# dp: ranks that read different data. pp: ranks that hold different layers. sp: ranks that hold different tokens of the
# same data. tp: ranks that hold different parts of the same layers. The last axis in `mesh_order` is the innermost: its
# ranks are next to each other, so on one machine, as tensor parallelism communicates the most.
AXES = ("dp", "pp", "sp", "tp")


def mesh_order(*, dp_outside: bool) -> tuple[str, ...]:
    """Returns the axes from the outermost to the innermost; `dp_outside` puts dp outside of pp."""
    return ("dp", "pp", "sp", "tp") if dp_outside else ("pp", "dp", "sp", "tp")


def rank_groups(sizes: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """Returns the groups of ranks that differ in their places along some axes only; each in ascending order.

    Args:
        sizes: Ranks along each axis, from the outermost to the innermost.
        along: The axes, in any order.
    """
    places = itertools.product(*(range(size) for size in sizes.values()))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        elsewhere = tuple(index for axis, index in zip(sizes, place, strict=True) if axis not in along)
        groups.setdefault(elsewhere, []).append(rank)
    return list(groups.values())


class HybridMesh:
    """The mesh of all ranks; see Note [Mesh axes].

    Collective: every rank of the world makes it, with the same sizes.

    Args:
        device_type: Of the tensors that the axes' groups send, such as "cpu".
        dp: Ranks along each axis; their product is the number of ranks.
        pp: See `dp`.
        sp: See `dp`.
        tp: See `dp`.
        dp_outside: The dp axis is outside of the pp axis; False: inside of it.

    Raises:
        ConfigError: There are more or fewer ranks.
        DesyncError: Other ranks make a mesh of other sizes.
    """

    def __init__(self, device_type: str, *, dp: int, pp: int, sp: int, tp: int, dp_outside: bool = True) -> None:
        given = {"dp": dp, "pp": pp, "sp": sp, "tp": tp}
        facts = [f"{axis}={size}" for axis, size in given.items()] + [f"dp_outside={dp_outside}"]
        agree("the sizes of the mesh's axes", facts)
        if math.prod(given.values()) != group_size():
            raise ConfigError(
                f"a mesh of {' x '.join(f'{axis} {size}' for axis, size in given.items())} has"
                f" {math.prod(given.values())} places, but there are {group_size()} ranks: give sizes whose product is"
                " the number of ranks"
            )
        self._sizes = {axis: given[axis] for axis in mesh_order(dp_outside=dp_outside)}
        self._device_type = device_type
        self.device_mesh: DeviceMesh = new_mesh(device_type, tuple(self._sizes.values()), tuple(self._sizes))
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._further_groups: list[dist.ProcessGroup] = []
        self._cpu_groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def axis_sizes(self) -> dict[str, int]:
        """Returns the number of ranks along each axis, in the order of `AXES`."""
        return {axis: self._sizes[axis] for axis in AXES}

    def size(self, *axes: str) -> int:
        """Returns the number of ranks of the group along these axes."""
        return math.prod(self._sizes[axis] for axis in axes)

    def rank(self, *axes: str) -> int:
        """Returns this rank's place in the group along these axes.

        Of several, the outermost axis of the mesh counts the most.
        """
        place = 0
        for axis in self._sizes:
            if axis in axes:
                place = place * self._sizes[axis] + self.device_mesh.get_local_rank(axis)
        return place

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Returns the group of the ranks that differ from this one in their places along these axes only.

        Several axes are flattened, as (dp, sp) for gradients; without any it is this rank alone. Collective over the
        world at the first call for these axes; afterwards the same group is returned, also for axes that add no ranks.
        """
        key = self._key(axes)
        if key not in self._groups:
            self._groups[key] = self._new_group(key)
        return self._groups[key]

    def cpu_group(self, *axes: str) -> dist.ProcessGroup | None:
        """Returns a group on the CPU of the same ranks as `group`, for what hosts agree on; None: `group` is one.

        Collective over the world at the first call for these axes.
        """
        if self._device_type == "cpu":
            return None
        key = self._key(axes)
        if key not in self._cpu_groups:
            self._cpu_groups[key] = new_cpu_group(self.group(*axes))
        return self._cpu_groups[key]

    def subgroup(self, axis: str, places: Sequence[int]) -> dist.ProcessGroup | None:
        """Returns a new group of the ranks at some places along an axis; None where this rank is at none of them.

        Collective over the world.
        """
        found: dist.ProcessGroup | None = None
        for line in rank_groups(self._sizes, (axis,)):
            ranks = [line[place] for place in places]
            group = new_group(ranks)
            if group is not None:
                found = group
                self._further_groups.append(group)
        return found

    def groups(self) -> list[dist.ProcessGroup | None]:
        """Returns all groups that were made of this mesh, and the world, in the same order on all ranks."""
        axes = self.device_mesh.get_all_groups()
        return [
            None,
            *dict.fromkeys((*axes, *self._groups.values(), *self._cpu_groups.values(), *self._further_groups)),
        ]

    def _key(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes that tell a group apart: those with ranks, or any one of the others where none has any."""
        key = tuple(axis for axis in self._sizes if axis in axes and self._sizes[axis] > 1)
        return key or tuple(axis for axis, size in self._sizes.items() if size == 1)[:1]

    def _new_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        world = dist.group.WORLD
        if world is not None and self.size(*axes) == group_size():
            return world
        if len(axes) == 1:
            return self.device_mesh.get_group(axes[0])
        mine = new_group_of_rows(rank_groups(self._sizes, axes))
        assert group_rank(mine) == self.rank(*axes), f"rank {group_rank()} has another place in its group"
        return mine
