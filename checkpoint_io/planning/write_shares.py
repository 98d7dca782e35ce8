"""Load balancing of writes: shards split into ranges, each with an owner rank and a writer rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.planning.file_hosts import assign_hosts, assign_writers, usable_replicas
from booster.checkpoint_io.planning.held_parts import DedupedShards
from booster.checkpoint_io.planning.placed_parts import FilePlacement, TensorOffsets, sort_by_file_offset
from booster.checkpoint_io.planning.tiling import changes

__all__ = ["BLOCK_BYTES", "RangeColumns", "balance_writes"]

BLOCK_BYTES = 16 * 2**20
_MIN_REGION_BYTES = 2**20  # below this, a second writer costs more than it saves

# Note [Write balancing]: all shards of one file with the same set of replicas form a region. Its bytes, in file order,
# are split evenly: each rank of the set writes one contiguous range, in rank order. Split points are multiples of the
# page size in the file, so that every rank can write full pages with O_DIRECT. Strided shards are scattered in the file
# and form separate regions, concatenated in slice order and split at page multiples of that order.
# All offsets are multiples of the item size, because wide dtypes come first in a file and item sizes are powers of two;
# so no split point falls inside an element.


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeColumns:
    """`WriteRange`s in plan order, as int64 columns; `start` and `stop` are the span."""

    owner: np.ndarray
    writer: np.ndarray
    slice_index: np.ndarray
    tensor: np.ndarray
    file: np.ndarray
    box: np.ndarray
    start: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitPoints:
    """Split points of regions. Regions are concatenated, so that offsets ascend over all of them.

    Attributes:
        part: Shards of the regions, by region and offset.
        place: Offset of each of `shard`.
        region: Region of each of `shard`, from 0.
        holders: Index of the set of replicas, per region.
        cut: Split points; one less per region than it has replicas.
        region_of_cut: Region of each of `split`.
    """

    shard: np.ndarray
    offset: np.ndarray
    region: np.ndarray
    replicas: np.ndarray
    split: np.ndarray
    region_of_split: np.ndarray


class _ReplicaSets:
    def __init__(self, sets: Sequence[np.ndarray], num_ranks: int) -> None:
        self.sizes = np.array([len(ranks) for ranks in sets], dtype=np.int64)
        self._firsts = np.cumsum(self.sizes) - self.sizes
        self._ranks = np.concatenate([np.zeros(0, dtype=np.int64), *sets])
        self._num_ranks = num_ranks
        self._keys = np.repeat(np.arange(len(sets)), self.sizes) * num_ranks + self._ranks

    def member(self, number: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return the rank at each index of each set."""
        ranks: np.ndarray = self._ranks[self._firsts[number] + index]
        return ranks

    def substitute_for(self, rank: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return each rank, or where it is not of the set, one of the set in its stead."""
        is_member = np.isin(number * self._num_ranks + rank, self._keys)
        return np.where(is_member, rank, self.member(number, rank % self.sizes[number]))


def balance_writes(deduped: DedupedShards, tensor_offsets: TensorOffsets, host_of_rank: np.ndarray) -> RangeColumns:
    """Split every shard into ranges and assign each to one rank; see Note [Write balancing].

    Args:
        deduped: Shards and their replicas.
        tensor_offsets: File and offset of each tensor.
        host_of_rank: Host index of each rank.
    """
    shards = sort_by_file_offset(deduped, tensor_offsets)
    host_of_file = assign_hosts(
        shards.file, shards.num_bytes, shards.replicas, deduped.replica_sets, tensor_offsets.num_files, host_of_rank
    )
    host = host_of_file[shards.file]
    replicas, usable = usable_replicas(host, shards.replicas, deduped.replica_sets, host_of_rank)
    shards = replace(shards, replicas=replicas)
    sets = _ReplicaSets(usable, len(host_of_rank))
    splits = _split_regions(shards, sets)
    shard, begin, end = _split_ranges(shards, splits)
    owner = _owners(shards, sets, splits, shard, begin)
    itemsize, start = shards.itemsize[shard], shards.start[shard]
    return RangeColumns(
        owner=owner,
        writer=assign_writers(owner, host[shard], host_of_rank),
        slice_index=deduped.slice_indices.lookup(shards.index[shard], owner),
        tensor=shards.tensor[shard],
        file=shards.file[shard],
        box=shards.box[shard],
        start=start + begin // itemsize,
        stop=start + end // itemsize,
    )


def _split_regions(shards: FilePlacement, sets: _ReplicaSets) -> _SplitPoints:
    """Return the split points of regions with several replicas; see Note [Write balancing]."""
    shard, region = _shards_by_region(shards, sets)
    num_bytes = shards.num_bytes[shard]
    begin = np.cumsum(num_bytes) - num_bytes
    first = np.flatnonzero(changes(region))
    sizes = np.add.reduceat(num_bytes, first) if len(first) else num_bytes
    offset = np.where(shards.is_strided[shard], begin - begin[first][region], shards.offset[shard])
    last = np.append(first[1:], len(shard)) - 1
    lengths = (offset + num_bytes)[last] + PAGE_BYTES if len(first) else num_bytes
    shift = np.cumsum(lengths) - lengths

    replicas = shards.replicas[shard[first]]
    region_of_split = np.repeat(np.arange(len(first)), sets.sizes[replicas] - 1)
    number = np.arange(len(region_of_split)) - np.searchsorted(region_of_split, region_of_split) + 1
    share = sets.sizes[replicas][region_of_split]
    size = sizes[region_of_split]
    target = begin[first][region_of_split] + size // share * number + size % share * number // share
    row = np.searchsorted(begin, target, side="right") - 1
    split = offset[row] + target - begin[row]
    split = (split + PAGE_BYTES // 2) // PAGE_BYTES * PAGE_BYTES
    return _SplitPoints(
        shard=shard,
        offset=offset + shift[region],
        region=region,
        replicas=replicas,
        split=split + shift[region_of_split],
        region_of_split=region_of_split,
    )


def _shards_by_region(shards: FilePlacement, sets: _ReplicaSets) -> tuple[np.ndarray, np.ndarray]:
    """Return the shards of regions large enough to split, by region and file order, and the region of each."""
    key = (shards.file * len(sets.sizes) + shards.replicas) * 2 + shards.is_strided
    _, region = np.unique(key, return_inverse=True)
    sizes = np.bincount(region, weights=shards.num_bytes)
    is_split = (sizes[region] >= _MIN_REGION_BYTES) & (sets.sizes[shards.replicas] > 1)
    shard = np.flatnonzero(is_split)
    shard = shard[np.argsort(region[shard], kind="stable")]
    return shard, np.cumsum(changes(region[shard])) - 1


def _split_ranges(shards: FilePlacement, splits: _SplitPoints) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return shard, first byte and last byte within the shard, for each range between split points or block ends."""
    shard_of_block, block = _blocks(shards)
    row = np.searchsorted(splits.offset, splits.split, side="right") - 1
    offset = splits.split - splits.offset[row]
    # A split point may lie before, between or after the shards of its region, and then splits none.
    is_inside = (row >= 0) & (offset < shards.num_bytes[splits.shard[row]])
    shard = np.concatenate([shard_of_block, splits.shard[row[is_inside]]])
    begin = np.concatenate([block, offset[is_inside]])
    order = np.lexsort((begin, shard))
    order = order[changes(shard[order], begin[order])]
    shard, begin = shard[order], begin[order]
    is_last = np.append(shard[1:] != shard[:-1], True)[: len(shard)]
    return shard, begin, np.where(is_last, shards.num_bytes[shard], np.roll(begin, -1))


def _blocks(shards: FilePlacement) -> tuple[np.ndarray, np.ndarray]:
    """Return shard and first byte of every block, aligned in the file or, for strided shards, within the shard."""
    origin = np.where(shards.is_strided, 0, shards.offset)
    first = origin // BLOCK_BYTES
    counts = (origin + shards.num_bytes - 1) // BLOCK_BYTES - first + 1
    shard = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(shard)) - np.repeat(np.cumsum(counts) - counts, counts)
    return shard, np.maximum((first[shard] + number) * BLOCK_BYTES - origin[shard], 0)


def _owners(
    shards: FilePlacement, sets: _ReplicaSets, splits: _SplitPoints, shard: np.ndarray, begin: np.ndarray
) -> np.ndarray:
    """Return the owner of each range: by split points in split regions, else the shard's primary or its substitute."""
    row_of_shard = np.full(len(shards.index), -1, dtype=np.int64)
    row_of_shard[splits.shard] = np.arange(len(splits.shard))
    row = row_of_shard[shard]
    owner = sets.substitute_for(shards.primary[shard], shards.replicas[shard])
    is_split = np.flatnonzero(row >= 0)
    row = row[is_split]
    region = splits.region[row]
    passed = np.searchsorted(splits.split, splits.offset[row] + begin[is_split], side="right")
    passed -= np.searchsorted(splits.region_of_split, region)
    owner[is_split] = sets.member(splits.replicas[region], passed)
    return owner
