"""Device mesh of the axes dp, pp, sp and tp, and of the user's own, and process groups, also of ColossalAI's modes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from booster.comm import (
    check_same_across_ranks,
    group_rank,
    group_size,
    host_group,
    new_group_of_rows,
    new_groups,
    new_mesh,
    register_host_group,
)
from booster.errors import ConfigError
from booster.validation import check_count

# dp: ranks that read different data. pp: ranks that hold different layers. sp: ranks that hold different tokens of the
# same data. tp: ranks that hold different shards of the same layers. The last axis in `mesh_order` is the innermost:
# its ranks are consecutive, so on one node, because tensor parallelism communicates the most.
AXES = ("dp", "pp", "sp", "tp")

# With expert parallelism the mesh has two axes in place of dp. ep: ranks that hold different experts. edp: ranks that
# hold the same ones. "dp" still names both together, which read different data. Likewise the axes of a grid of
# tensor-parallel ranks are in place of tp; see `TensorGridShape`.
EXPERT_AXES = ("edp", "ep")


def mesh_order(*, dp_outside: bool) -> tuple[str, ...]:
    """Return the axes from the outermost to the innermost; `dp_outside` puts dp outside of pp."""
    return ("dp", "pp", "sp", "tp") if dp_outside else ("pp", "dp", "sp", "tp")


def rank_groups(sizes: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks whose coordinates differ along the given axes only, each in ascending order.

    Args:
        sizes: Number of ranks along each axis, from the outermost to the innermost.
        along: Axes of the groups, in any order.
    """
    coordinates = itertools.product(*(range(size) for size in sizes.values()))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in enumerate(coordinates):
        other_axes = tuple(index for axis, index in zip(sizes, coordinate, strict=True) if axis not in along)
        groups.setdefault(other_axes, []).append(rank)
    return list(groups.values())


class HybridMesh:
    """The device mesh of all ranks, with the axes `AXES`; with expert parallelism `EXPERT_AXES` replace dp.

    Every method takes "dp" for both of them, and "tp" for all axes of a grid.

    Attributes:
        extra_axes: Names of the user's own axes.
        device_mesh: torch's mesh.

    Args:
        device_type: Device type of the axes' groups, such as "cpu".
        dp: Size of the dp axis. The product of the four sizes is the world size.
        pp: Size of the pp axis.
        sp: Size of the sp axis.
        tp: Size of the tp axis.
        ep: Number of the dp ranks that share the experts, a divisor of `dp`.
        dp_outside: If True, the dp axis is outside of the pp axis, otherwise inside.
        tp_axes: Sizes of the axes in place of tp, from the outermost to the innermost, whose product is `tp`; optional.
        extra_axes: Sizes of further axes, from the outermost; all are outside of the others. Optional.

    Raises:
        ConfigError: The product of the sizes is not the world size.
        DesyncError: The sizes differ between ranks.

    Collective: yes, over the world.
    """

    def __init__(
        self,
        device_type: str,
        *,
        dp: int,
        pp: int,
        sp: int,
        tp: int,
        ep: int = 1,
        dp_outside: bool = True,
        tp_axes: Mapping[str, int] | None = None,
        extra_axes: Mapping[str, int] | None = None,
    ) -> None:
        self.extra_axes = tuple(extra_axes or ())
        given = dict(extra_axes or {}) | {"dp": dp, "pp": pp, "sp": sp, "tp": tp}
        replaced: dict[str, Mapping[str, int]] = {"dp": {"edp": dp // ep, "ep": ep}} if ep > 1 else {}
        replaced |= {"tp": tp_axes} if tp_axes else {}
        sizes = given | {"ep": ep, **(tp_axes or {})}
        fingerprint = [f"{axis}={size}" for axis, size in sizes.items()] + [f"dp_outside={dp_outside}"]
        check_same_across_ranks("the sizes of the mesh's axes", fingerprint)
        if math.prod(given.values()) != group_size():
            raise ConfigError(
                f"a mesh of {' x '.join(f'{axis} {size}' for axis, size in given.items())} has"
                f" {math.prod(given.values())} ranks, but the world size is {group_size()}: give sizes whose product is"
                " the world size"
            )
        self._sizes: dict[str, int] = dict(extra_axes or {})
        for axis in mesh_order(dp_outside=dp_outside):
            self._sizes |= replaced.get(axis, {axis: given[axis]})
        self._axes_of = {axis: tuple(own) for axis, own in replaced.items()} | (
            {} if ep > 1 else {"edp": ("dp",), "ep": ()}
        )
        self._device_type = device_type
        self.device_mesh: DeviceMesh = new_mesh(device_type, tuple(self._sizes.values()), tuple(self._sizes))
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._subgroups: list[dist.ProcessGroup] = []
        self._cpu_groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def axis_sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis, in the order of `AXES`, and of the extra axes."""
        return {axis: self.size(axis) for axis in (*AXES, *self.extra_axes)}

    def size(self, *axes: str) -> int:
        """Return the number of ranks of the group along these axes."""
        return math.prod(self._sizes[axis] for axis in self._own_axes(axes))

    def rank(self, *axes: str) -> int:
        """Return this rank's rank in the group along these axes, in row-major order of the mesh."""
        index, own_axes = 0, self._own_axes(axes)
        for axis in self._sizes:
            if axis in own_axes:
                index = index * self._sizes[axis] + self.device_mesh.get_local_rank(axis)
        return index

    def ranks_along(self, axis: str, *axes: str) -> list[int]:
        """Return the ranks, in the group along `axes`, of this rank and those that differ from it along `axis` only."""
        own_axes = [one for one in self._sizes if one in self._own_axes(axes)]
        own = self.rank(axis)
        stride = math.prod(self._sizes[one] for one in own_axes[own_axes.index(axis) + 1 :])
        return [self.rank(*axes) + (other - own) * stride for other in range(self._sizes[axis])]

    def rank_at(self, **coordinates: int) -> int:
        """Return the global rank at these coordinates, and at this rank's ones of the other axes."""
        given = {own: index for axis, index in coordinates.items() for own in self._own_axes((axis,))}
        index = tuple(given.get(axis, self.device_mesh.get_local_rank(axis)) for axis in self._sizes)
        return int(self.device_mesh.mesh[index])

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the group of the ranks whose coordinates differ from this rank's along these axes only.

        Several axes are flattened, such as (dp, sp) for gradients. Without axes the group is this rank alone. Groups
        are cached; axes of size 1 do not make a new one.

        Collective: over the world at the first call for these axes.
        """
        key = self._key(axes)
        if key not in self._groups:
            group = self._axis_group(key)
            if group is None:
                group = new_group_of_rows(rank_groups(self._sizes, key))
                assert group_rank(group) == self.rank(*key), f"rank {group_rank()} has an unexpected group rank"
                if key in self._cpu_groups:
                    register_host_group(group, self._cpu_groups[key])
            self._groups[key] = group
        return self._groups[key]

    def control_group(self, *axes: str) -> dist.ProcessGroup:
        """Return a group of the same ranks as `group` for the host's collectives: on an accelerator a CPU group.

        On an accelerator it makes no group for device tensors, which would cost device memory.

        Collective: over the world at the first call for these axes.
        """
        key = self._key(axes)
        if self._device_type == "cpu":
            return self.group(*axes)
        if key not in self._cpu_groups:
            known = self._groups.get(key) or self._axis_group(key)
            found = None if known is None else host_group(known)
            if found is None or found is known:
                # By all ranks: torch names a group that only its members make by how many groups they are in, which
                # differs between the stages of a pipeline.
                found = new_group_of_rows(rank_groups(self._sizes, key), "gloo")
                if known is not None:
                    register_host_group(known, found)
            self._cpu_groups[key] = found
        return self._cpu_groups[key]

    def subgroup(self, axis: str, coordinates: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        """Return a new group of the ranks at these coordinates of an axis, or None if this rank is not in it.

        Args:
            axis: Axis of the mesh.
            coordinates: Coordinates along it.
            backend: Backend name, optional; defaults to the world's.

        Collective: over the world.
        """
        rows = rank_groups(self._sizes, (axis,))
        found = new_groups([[ranks[coordinate] for coordinate in coordinates] for ranks in rows], backend)
        if found is not None:
            self._subgroups.append(found)
        return found

    def subgroups(self, axis: str, coordinates: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return the new groups of `subgroup` by their coordinates, once each. Collective over the world."""
        found: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for members in dict.fromkeys(coordinates):
            group = self.subgroup(axis, members)
            cpu_group = None if self._device_type == "cpu" else self.subgroup(axis, members, "gloo")
            if group is not None:
                found[members] = group
                if cpu_group is not None:
                    register_host_group(group, cpu_group)
        return found

    def groups(self) -> list[dist.ProcessGroup | None]:
        """Return the world and all groups of this mesh, in the same order on all ranks."""
        axes = self.device_mesh.get_all_groups()
        return [
            None,
            *dict.fromkeys((*axes, *self._groups.values(), *self._cpu_groups.values(), *self._subgroups)),
        ]

    def _own_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return axes of this mesh: those that replace dp and tp in their places, none for ep without experts."""
        return tuple(own for axis in axes for own in self._axes_of.get(axis, (axis,)))

    def _key(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes that identify a group: those of size above 1, or else the first one of size 1."""
        own_axes = self._own_axes(axes)
        key = tuple(axis for axis in self._sizes if axis in own_axes and self._sizes[axis] > 1)
        return key or tuple(axis for axis, size in self._sizes.items() if size == 1)[:1]

    def _axis_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """Return the group of the mesh along these axes, or None if it has none."""
        world = dist.group.WORLD
        if world is not None and self.size(*axes) == group_size():
            return world
        return self.device_mesh.get_group(axes[0]) if len(axes) == 1 else None


# Axes that replace the tensor axis in each mode, from the outermost, and the axes along which each group lies. Rank
# (i, j) of a 2D mesh is in row i and column j; a row's ranks differ in their column. 3D: rank (k, j, i) gathers inputs
# along j and weights along i, and reduces outputs along k.
_MESHES: Mapping[str | None, tuple[str, ...]] = {
    None: ("tensor",),
    "1d": ("tensor",),
    "sequence": ("tensor",),
    "2d": ("i", "j"),
    "2.5d": ("depth", "i", "j"),
    "3d": ("k", "j", "i"),
}
_GROUPS: Mapping[str | None, Mapping[str, tuple[str, ...]]] = {
    "1d": {"1d": ("tensor",)},
    "sequence": {"sequence": ("tensor",), "sequence_dp": ("data", "tensor")},
    "2d": {"2d_row": ("j",), "2d_col": ("i",)},
    "2.5d": {"2p5d_row": ("j",), "2p5d_col": ("i",), "2p5d_dep": ("depth",), "2p5d_xz": ("depth", "j")},
    "3d": {"3d_input": ("j",), "3d_weight": ("i",), "3d_output": ("k",)},
}


def parallel_groups(
    world_size: int, *, pipeline: int = 1, tensor: int = 1, mode: str | None = None, depth: int = 1
) -> dict[str, list[list[int]]]:
    """Return the groups of ranks of every parallel mode of a ColossalAI configuration. No communication.

    Data-parallel ranks are the farthest apart, then pipeline stages, then tensor-parallel ranks, which are consecutive:
    the mesh of `HybridParallelPlugin`, whose axes are dp, pp and tp.

    Args:
        world_size: Number of ranks.
        pipeline: Number of pipeline stages.
        tensor: Number of tensor-parallel ranks.
        mode: "1d", "2d", "2.5d", "3d" or "sequence"; optional with one tensor-parallel rank.
        depth: Number of 2D meshes of the mode "2.5d".

    Returns:
        Groups by the names of ColossalAI's `ParallelMode`: "global", "data", "pipeline", "model", "tensor", and those
        of the mode, such as "2d_row". Each rank is in one group of each name.

    Raises:
        ConfigError: The sizes do not fit each other.

    Examples:
        >>> parallel_groups(8, pipeline=2, tensor=2, mode="1d")["data"]
        [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    check_count(world_size=world_size, pipeline=pipeline, tensor=tensor, depth=depth)
    if mode not in _MESHES or (mode is None and tensor > 1):
        raise ConfigError(
            f"mode={mode!r} with tensor={tensor} is not a tensor-parallel mode: choose one of"
            f" {', '.join(repr(one) for one in _MESHES if one)}"
        )
    if world_size % (pipeline * tensor):
        raise ConfigError(
            f"pipeline={pipeline} times tensor={tensor} does not divide world_size={world_size}: choose sizes whose"
            " product does"
        )
    inner = _tensor_sizes(tensor, mode, depth)
    sizes = {"data": world_size // (pipeline * tensor), "pipeline": pipeline, **inner}
    along: dict[str, tuple[str, ...]] = {
        "global": tuple(sizes),
        "data": ("data",),
        "pipeline": ("pipeline",),
        "model": ("pipeline", *inner),
        "tensor": tuple(inner),
        **_GROUPS.get(mode, {}),
    }
    return {name: rank_groups(sizes, axes) for name, axes in along.items()}


def _tensor_sizes(tensor: int, mode: str | None, depth: int) -> dict[str, int]:
    axes = _MESHES[mode]
    if mode != "2.5d" and depth != 1:
        raise ConfigError(f"depth={depth} has no effect with mode={mode!r}: leave it out, or write mode='2.5d'")
    if len(axes) == 1:
        return {axes[0]: tensor}
    dims = 3 if mode == "3d" else 2
    side = round((tensor / depth) ** (1 / dims))
    sizes = {axis: depth if axis == "depth" else side for axis in axes}
    if math.prod(sizes.values()) != tensor:
        needed = {"2d": "a square, such as 4", "2.5d": "depth times a square, such as 8 with depth=2"}
        raise ConfigError(
            f"tensor={tensor} with mode={mode!r} and depth={depth} makes no mesh of equal sides: give"
            f" {needed.get(str(mode), 'a cube, such as 8')}"
        )
    return sizes
