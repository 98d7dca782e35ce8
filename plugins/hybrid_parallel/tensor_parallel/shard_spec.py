"""Sharding of a dimension's features over tensor-parallel ranks. Pure functions, equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from booster.core.shard_spec import Box, ShardRegion, ShardSpec
from booster.errors import ConfigError

# Note [Units and groups]
# A sharded dimension consists of one block or of several consecutive ones (query, key and value of a fused projection;
# gate and up). A block consists of indivisible units: heads, or single features. With grouped-query attention several
# query heads read one key-value head: the block of queries has `num_units` query heads in `num_groups` groups, that of
# keys one unit per group. With at least as many groups as ranks, groups are distributed as evenly as possible. With
# fewer groups than ranks, query heads are distributed as evenly as possible, and each rank holds the key-value heads
# that its query heads read: some are replicated on several ranks, of which the first is primary.


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive features that are sharded in the same way; see Note [Units and groups].

    Attributes:
        num_units: Number of units, which are not divided between ranks.
        unit_size: Number of features per unit.
        num_query_units: Number of units of the query block that determines the sharding; optional, defaults to
            `num_units`.
        num_groups: Number of groups of query units; optional, defaults to one group per unit.
    """

    num_units: int
    unit_size: int = 1
    num_query_units: int | None = None
    num_groups: int | None = None

    @property
    def size(self) -> int:
        """Number of features."""
        return self.num_units * self.unit_size


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Range of a block's units on a rank.

    Attributes:
        start: First unit.
        stop: End of the range, exclusive.
        num_non_primary: Number of leading units whose primary copy is on another rank.
    """

    start: int
    stop: int
    num_non_primary: int = 0


def even_sizes(count: int, num_parts: int) -> list[int]:
    """Return the sizes of even parts of a range; the first parts get one more if the count is not divisible."""
    return [(count + num_parts - 1 - part) // num_parts for part in range(num_parts)]


def even_range(count: int, num_parts: int, part: int) -> tuple[int, int]:
    """Return start and end (exclusive) of one of the even parts of a range; see `even_sizes`."""
    sizes = even_sizes(count, num_parts)
    start = sum(sizes[:part])
    return start, start + sizes[part]


def units_of_rank(block: Block, num_ranks: int, rank: int) -> UnitRange:
    """Return the units of a block that a rank holds.

    Raises:
        ConfigError: There are more ranks than units, or the rank's query heads share key-value heads unevenly.
    """
    num_queries = block.num_query_units or block.num_units
    num_groups = block.num_groups or num_queries
    if num_queries < num_ranks:
        raise ConfigError(
            f"tp_size={num_ranks} is larger than the {num_queries} heads or features of a module, so some ranks would"
            f" have none: use a tp_size of at most {num_queries}, or leave the module out of the plan"
        )
    per_group = num_queries // num_groups
    if num_groups >= num_ranks:
        start, stop = even_range(num_groups, num_ranks, rank)
        scale = block.num_units // num_groups
        return UnitRange(start * scale, stop * scale)
    first, last = even_range(num_queries, num_ranks, rank)
    if block.num_units == num_queries:
        return UnitRange(first, last)
    start, stop = first // per_group, (last - 1) // per_group + 1
    counts = {min(last, (one + 1) * per_group) - max(first, one * per_group) for one in range(start, stop)}
    if len(counts) > 1:
        raise ConfigError(
            f"tp_size={num_ranks} gives rank {rank} the query heads {first} to {last - 1} of {num_queries}, which share"
            f" {num_groups} key-value heads unevenly: use a tp_size of at most {num_groups}, or a multiple of it"
        )
    return UnitRange(start, stop, num_non_primary=int(first % per_group > 0))


def local_sizes(blocks: Sequence[Block], num_ranks: int) -> list[int]:
    """Return each rank's number of features of consecutive blocks."""
    ranges = [[(block, units_of_rank(block, num_ranks, rank)) for block in blocks] for rank in range(num_ranks)]
    return [sum((held.stop - held.start) * block.unit_size for block, held in rank_ranges) for rank_ranges in ranges]


def sharded_spec(shape: Sequence[int], dim: int, blocks: Sequence[Block], num_ranks: int, rank: int) -> ShardSpec:
    """Return the shard spec of a parameter that is sharded along one dimension.

    Args:
        shape: Shape of the logical tensor.
        dim: The sharded dimension.
        blocks: Consecutive blocks of the dimension; their sizes add up to its length.
        num_ranks: Number of tensor-parallel ranks.
        rank: This rank among them.
    """
    dim %= len(shape)
    if sum(block.size for block in blocks) != shape[dim]:
        raise ConfigError(
            f"the plan divides a dimension of {shape[dim]} features into blocks of {[block.size for block in blocks]},"
            " which do not add up: give the sizes into which the model's forward splits the dimension"
        )
    regions = []
    offset = position = 0
    for block in blocks:
        unit_range = units_of_rank(block, num_ranks, rank)
        non_primary = (unit_range.start, unit_range.start + unit_range.num_non_primary, False)
        primary = (unit_range.start + unit_range.num_non_primary, unit_range.stop, True)
        for start, stop, is_primary in (non_primary, primary):
            length = (stop - start) * block.unit_size
            if length > 0:
                logical = (offset + start * block.unit_size, length)
                regions.append(_region(shape, dim, (position, length), logical, is_primary))
            position += length
        offset += block.size
    local_shape = (*shape[:dim], position, *shape[dim + 1 :])
    return ShardSpec(logical_shape=tuple(shape), local_shape=local_shape, regions=tuple(regions))


def vocabulary_rows(size: int, multiple: int, num_ranks: int, rank: int) -> tuple[int, int, int]:
    """Return a rank's first row of the vocabulary, the end of its rows (exclusive), and its padded number of rows.

    Args:
        size: Number of entries of the vocabulary.
        multiple: Multiple to which the vocabulary is padded.
        num_ranks: Number of tensor-parallel ranks, all with the same padded number of rows.
        rank: This rank among them.
    """
    step = math.lcm(multiple, num_ranks)
    padded_rows = -(-size // step) * step // num_ranks
    start = min(rank * padded_rows, size)
    return start, min(start + padded_rows, size), padded_rows


def vocabulary_sizes(size: int, multiple: int, num_ranks: int) -> tuple[int, ...]:
    """Return each rank's number of entries of the vocabulary, without padding; see `vocabulary_rows`."""
    rows = [vocabulary_rows(size, multiple, num_ranks, rank) for rank in range(num_ranks)]
    return tuple(stop - start for start, stop, _ in rows)


def vocabulary_spec(shape: Sequence[int], multiple: int, num_ranks: int, rank: int) -> ShardSpec:
    """Return the shard spec of a parameter whose rows are the vocabulary, padded with zeros."""
    start, stop, padded_rows = vocabulary_rows(shape[0], multiple, num_ranks, rank)
    rows = stop - start
    regions = (_region(shape, 0, (0, rows), (start, rows), True),) if rows > 0 else ()
    return ShardSpec(logical_shape=tuple(shape), local_shape=(padded_rows, *shape[1:]), regions=regions)


def _region(
    shape: Sequence[int], dim: int, local: tuple[int, int], logical: tuple[int, int], is_primary: bool
) -> ShardRegion:
    full: Box = tuple((0, size) for size in shape)
    return ShardRegion(
        local=(*full[:dim], local, *full[dim + 1 :]),
        logical=(*full[:dim], logical, *full[dim + 1 :]),
        is_primary=is_primary,
    )
