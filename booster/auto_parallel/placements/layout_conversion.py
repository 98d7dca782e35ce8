"""Layout conversion: the cheapest sequence of collectives from some placements of a tensor on a mesh to others.

Note [Layout conversion]
A layout has a placement per mesh axis: replicated, sharded along a dimension, or partial. A step changes the placement
on one axis by one collective of that axis, or by a local slice:

    sharded -> replicated          all_gather
    sharded -> sharded elsewhere   all_to_all
    partial -> replicated          all_reduce
    partial -> sharded             reduce_scatter
    replicated -> sharded          slice

If several axes shard one dimension, a later axis divides the shards of an earlier one. So an axis may start or end
sharding a dimension only while no later axis shards it: otherwise a rank's elements would not be consecutive. Layouts
are the nodes of a graph, steps its edges with their time on the machine, and the conversion is the shortest path
(Dijkstra, 1959). The time of a step depends on the size of the rank's shard, so the order of steps matters: slices come
before collectives, and a tensor is gathered as late as possible.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from booster.errors import ConfigError
from booster.estimate.machine_profile import CollectiveSpeed, Curve, MachineProfile
from booster.placements import is_placement

Layout = tuple[Placement, ...]
_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """One step of a conversion; see Note [Layout conversion].

    Attributes:
        operation: "all_gather", "all_to_all", "all_reduce", "reduce_scatter" or "slice".
        axis: Mesh axis whose placement changes.
        placements: Placements after the step.
        num_bytes: Bytes that each rank sends.
        seconds: Time of the step.
    """

    operation: str
    axis: int
    placements: Layout
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LayoutConversion:
    """Sequence of steps from one layout to another.

    Attributes:
        source: Placements before.
        target: Placements after.
        steps: The steps; empty if both are equal.
    """

    source: Layout
    target: Layout
    steps: tuple[ConversionStep, ...]

    @property
    def seconds(self) -> float:
        """Time of all steps."""
        return sum(one.seconds for one in self.steps)

    @property
    def num_bytes(self) -> int:
        """Bytes that each rank sends."""
        return sum(one.num_bytes for one in self.steps)


@dataclass(frozen=True, slots=True)
class AxisSpeed:
    """Speed of one mesh axis: its number of ranks, its collectives in the order of their names, and a local copy."""

    size: int
    collectives: tuple[CollectiveSpeed, ...]
    copy: Curve

    @staticmethod
    def of(profile: MachineProfile, ranks: Sequence[int]) -> AxisSpeed:
        """Return the speed of a group of ranks.

        Raises:
            ConfigError: The profile has no time of one of the collectives.
        """
        copy = profile.curve("elementwise", "float32")
        if len(ranks) == 1:
            return AxisSpeed(1, (), copy)
        num_hosts = len({rank // profile.ranks_per_host for rank in ranks})
        speeds = [profile.speed(one, len(ranks), num_hosts) for one in _COLLECTIVES]
        missing = [name for name, speed in zip(_COLLECTIVES, speeds, strict=True) if speed is None]
        if missing:
            raise ConfigError(
                f"the machine profile of {profile.machine!r} with {profile.num_ranks} rank(s) has no time of"
                f" {', '.join(missing)}: measure one with several ranks, `booster profile-mesh --nproc {len(ranks)}`"
            )
        return AxisSpeed(len(ranks), tuple(one for one in speeds if one is not None), copy)

    def seconds(self, operation: str, num_bytes: float) -> float:
        """Return the time of a collective in which each rank sends so many bytes."""
        return self.collectives[_COLLECTIVES.index(operation)].seconds(num_bytes)


def find_conversion(
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: DeviceMesh | Sequence[int],
    source: Sequence[Placement],
    target: Sequence[Placement],
    profile: MachineProfile,
) -> LayoutConversion:
    """Return the fastest conversion of a tensor from one layout to another; see Note [Layout conversion].

    Results are cached. No step goes to a partial layout: on an axis where the target is partial, the source must be.

    Args:
        shape: Shape of the full tensor.
        dtype: Its dtype.
        mesh: Device mesh, or the sizes of the axes of one whose ranks are in row-major order.
        source: Placements before, one per axis, of `torch.distributed.tensor`.
        target: Placements after.
        profile: Speed of the machine.

    Raises:
        ConfigError: Placements do not fit to the shape or the mesh, or can't be converted to each other.

    Collective: no.
    """
    sizes = tuple(mesh.mesh.shape) if isinstance(mesh, DeviceMesh) else tuple(mesh)
    given = tuple(shape)
    layouts = [_checked(name, given, sizes, one) for name, one in (("source", source), ("target", target))]
    axes = tuple(AxisSpeed.of(profile, ranks) for ranks in _axis_ranks(mesh))
    return search(given, dtype.itemsize, axes, *layouts)


def convert_layout(tensor: DTensor, placements: Sequence[Placement], profile: MachineProfile) -> DTensor:
    """Return a tensor with other placements, by the fastest conversion. Differentiable, as `DTensor.redistribute`.

    Args:
        tensor: Tensor on any mesh.
        placements: Placements of the result, one per mesh axis.
        profile: Speed of the machine, equal on all ranks.

    Raises:
        ConfigError: The tensor is not a DTensor, or can't be converted.

    Collective: yes, on all ranks of the mesh, with the same arguments.
    """
    if not isinstance(tensor, DTensor):
        raise ConfigError(
            f"convert_layout() got a {type(tensor).__name__}, which has no placements: give a DTensor, such as"
            " distribute_tensor(tensor, mesh, [Shard(0)])"
        )
    mesh = tensor.device_mesh
    for step in find_conversion(tensor.shape, tensor.dtype, mesh, tensor.placements, placements, profile).steps:
        tensor = tensor.redistribute(mesh, step.placements)
    return tensor


def local_size(shape: Sequence[int], sizes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Return the largest shape of any rank's shard."""
    local = list(shape)
    for size, placement in zip(sizes, layout, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // size)
    return tuple(local)


def one_step_conversions(
    shape: tuple[int, ...], itemsize: int, axes: tuple[AxisSpeed, ...], layout: Layout
) -> Iterator[ConversionStep]:
    """Yield all steps from a layout; see Note [Layout conversion]."""
    sizes = [axis.size for axis in axes]
    held = math.prod(local_size(shape, sizes, layout)) * itemsize
    for index, (axis, placement) in enumerate(zip(axes, layout, strict=True)):
        closed = {one.dim for one in layout[index + 1 :] if isinstance(one, Shard)}
        if isinstance(placement, Shard) and placement.dim in closed:
            continue
        shards: list[Placement] = [Shard(dim) for dim in range(len(shape)) if dim not in closed]
        for after in (Replicate(), *shards):
            if after == placement:
                continue
            operation = _operation(placement, after)
            placements = (*layout[:index], after, *layout[index + 1 :])
            kept = math.prod(local_size(shape, sizes, placements)) * itemsize
            if operation == "slice" or axis.size == 1:
                yield ConversionStep("slice", index, placements, 0, axis.copy.seconds(2 * kept))
                continue
            sent = held * (axis.size - 1)
            if operation != "all_gather":
                sent = (2 if operation == "all_reduce" else 1) * sent // axis.size
            yield ConversionStep(operation, index, placements, sent, axis.seconds(operation, sent))


def _operation(before: Placement, after: Placement) -> str:
    if isinstance(before, Partial):
        return "all_reduce" if isinstance(after, Replicate) else "reduce_scatter"
    if isinstance(before, Shard):
        return "all_gather" if isinstance(after, Replicate) else "all_to_all"
    return "slice"


@lru_cache(maxsize=4096)
def search(
    shape: tuple[int, ...], itemsize: int, axes: tuple[AxisSpeed, ...], source: Layout, target: Layout
) -> LayoutConversion:
    """Return the shortest path between layouts. Among equally fast ones, it has the fewest steps. Cached.

    Raises:
        ConfigError: A target is partial where the source is not.
    """
    best: dict[Layout, tuple[float, int]] = {source: (0.0, 0)}
    arrived: dict[Layout, tuple[Layout, ConversionStep]] = {}
    order = itertools.count()  # placements are not ordered
    queue = [(0.0, 0, next(order), source)]
    while queue:
        seconds, num_steps, _, layout = heapq.heappop(queue)
        if layout == target:
            steps = []
            while layout != source:
                layout, step = arrived[layout]
                steps.append(step)
            return LayoutConversion(source, target, tuple(reversed(steps)))
        if (seconds, num_steps) > best[layout]:
            continue
        for step in one_step_conversions(shape, itemsize, axes, layout):
            cost = (seconds + step.seconds, num_steps + 1)
            if step.placements not in best or cost < best[step.placements]:
                best[step.placements] = cost
                arrived[step.placements] = (layout, step)
                heapq.heappush(queue, (*cost, next(order), step.placements))
    raise ConfigError(
        f"a tensor with the placements {list(source)} can't be converted to {list(target)}: only a tensor that is"
        " partial already can stay so; give Shard or Replicate"
    )


def _checked(name: str, shape: tuple[int, ...], sizes: tuple[int, ...], layout: Sequence[Placement]) -> Layout:
    if len(layout) != len(sizes):
        raise ConfigError(
            f"{name} has {len(layout)} placement(s) for a mesh of {len(sizes)} axes: give one per axis, Replicate() for"
            " the others"
        )
    return tuple(_checked_placement(name, shape, one) for one in layout)


def _checked_placement(name: str, shape: tuple[int, ...], placement: Placement) -> Placement:
    if not is_placement(placement) or type(placement) not in (Replicate, Shard, Partial):
        raise ConfigError(f"{name} has {placement!r}: give Shard(dim), Replicate() or Partial()")
    if not isinstance(placement, Shard):
        return placement
    if not -len(shape) <= placement.dim < len(shape):
        raise ConfigError(
            f"{name} has {placement!r} for a tensor of shape {shape}, which has the dimensions 0 to {len(shape) - 1}:"
            " give one of them"
        )
    return Shard(placement.dim % len(shape))


def _axis_ranks(mesh: DeviceMesh | Sequence[int]) -> list[list[int]]:
    """Return the ranks of the first group along each axis."""
    if isinstance(mesh, DeviceMesh):
        ranks = mesh.mesh
    else:
        with torch.device("cpu"):
            ranks = torch.arange(math.prod(mesh)).reshape(tuple(mesh))
    return [
        ranks[tuple(slice(None) if axis == other else 0 for other in range(ranks.dim()))].tolist()
        for axis in range(ranks.dim())
    ]
