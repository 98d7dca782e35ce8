"""Shard specs of parameters on a grid of ranks. Pure functions, equal on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from booster.core.shard_spec import Box, ShardSpec
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block, sharded_spec

from .grid import TensorGridShape


def weight_spec(
    shape: Sequence[int], dim: int, blocks: Sequence[Block], grid: TensorGridShape, rank: int, *, is_second: bool
) -> ShardSpec:
    """Return the shard spec of a weight, in which `dim` has the features between the two layers of a pair."""
    layout, coordinates = grid.weight(is_second=is_second), grid.coordinates(rank)
    inner_axis, outer_axis = (layout.inputs, layout.outputs) if is_second else (layout.outputs, layout.inputs)
    other, outputs = 1 - dim, (1 - dim if is_second else dim)
    spec = sharded_spec(shape, dim, blocks, grid.side, coordinates[inner_axis])
    spec = _narrowed(spec, other, coordinates[outer_axis], grid.side)
    if layout.rows is not None:
        spec = _narrowed(spec, outputs, coordinates[layout.rows], grid.side)
    return _primary_at_zero(spec, grid, rank, {layout.outputs, layout.inputs, layout.rows})


def bias_spec(
    shape: Sequence[int], blocks: Sequence[Block], grid: TensorGridShape, rank: int, *, is_second: bool
) -> ShardSpec:
    """Return the shard spec of a bias of this shape, whose features are those of `weight_spec`."""
    return feature_spec(shape, grid, rank) if is_second else per_head_spec(shape, 0, blocks, grid, rank)


def per_head_spec(
    shape: Sequence[int], dim: int, blocks: Sequence[Block], grid: TensorGridShape, rank: int
) -> ShardSpec:
    """Return the shard spec of a parameter with one value per feature between the two layers of a pair, or per head."""
    axis = grid.inner.features
    spec = sharded_spec(shape, dim, blocks, grid.side, grid.coordinates(rank)[axis])
    return _primary_at_zero(spec, grid, rank, {axis})


def feature_spec(shape: Sequence[int], grid: TensorGridShape, rank: int) -> ShardSpec:
    """Return the shard spec of a parameter with one value per feature, such as a norm's weight, in the outer layout."""
    axis = grid.outer.features
    spec = _narrowed(ShardSpec.unsharded(shape), 0, grid.coordinates(rank)[axis], grid.side)
    return _primary_at_zero(spec, grid, rank, {axis})


def _primary_at_zero(spec: ShardSpec, grid: TensorGridShape, rank: int, used: Collection[str | None]) -> ShardSpec:
    """Return a spec that is primary at coordinate 0 of the other axes, along which ranks hold the same."""
    is_replica = any(index for axis, index in grid.coordinates(rank).items() if axis not in used)
    return spec.non_primary() if is_replica else spec


def _narrowed(spec: ShardSpec, dim: int, index: int, num_shards: int) -> ShardSpec:
    """Return the spec of one of equal parts of the local tensor along a dimension."""
    length = spec.local_shape[dim] // num_shards
    start, regions = index * length, []
    for region in spec.regions:
        (local, size), (logical, _) = region.local[dim], region.logical[dim]
        first, last = max(local, start), min(local + size, start + length)
        if first < last:
            here = _with(region.local, dim, (first - start, last - first))
            there = _with(region.logical, dim, (logical + first - local, last - first))
            regions.append(replace(region, local=here, logical=there))
    local_shape = (*spec.local_shape[:dim], length, *spec.local_shape[dim + 1 :])
    return replace(spec, local_shape=local_shape, regions=tuple(regions))


def _with(box: Box, dim: int, span: tuple[int, int]) -> Box:
    return (*box[:dim], span, *box[dim + 1 :])
