"""Load balancing of writes: shards split into ranges, each with an owner rank and a writer rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.planning.file_hosts import choose_hosts, usable_holders, writers_of
from booster.checkpoint_io.planning.held_parts import HeldParts
from booster.checkpoint_io.planning.placed_parts import PlacedParts, Placement, in_file_order
from booster.checkpoint_io.planning.tiling import changes

__all__ = ["BLOCK_BYTES", "RangeColumns", "divide"]

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
class _Cuts:
    """Split points of regions. Regions are concatenated, so that offsets ascend over all of them.

    Attributes:
        part: Shards of the regions, by region and offset.
        place: Offset of each of `part`.
        region: Region of each of `part`, from 0.
        holders: Index of the set of replicas, per region.
        cut: Split points; one less per region than it has replicas.
        region_of_cut: Region of each of `cut`.
    """

    part: np.ndarray
    place: np.ndarray
    region: np.ndarray
    holders: np.ndarray
    cut: np.ndarray
    region_of_cut: np.ndarray


class _HolderSets:
    def __init__(self, sets: Sequence[np.ndarray], num_ranks: int) -> None:
        self.sizes = np.array([len(ranks) for ranks in sets], dtype=np.int64)
        self._firsts = np.cumsum(self.sizes) - self.sizes
        self._ranks = np.concatenate([np.zeros(0, dtype=np.int64), *sets])
        self._num_ranks = num_ranks
        self._keys = np.repeat(np.arange(len(sets)), self.sizes) * num_ranks + self._ranks

    def member(self, number: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the rank at each index of each set."""
        ranks: np.ndarray = self._ranks[self._firsts[number] + place]
        return ranks

    def standing_for(self, rank: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return each rank, or where it is not of the set, one of the set in its stead."""
        is_member = np.isin(number * self._num_ranks + rank, self._keys)
        return np.where(is_member, rank, self.member(number, rank % self.sizes[number]))


def divide(held: HeldParts, placement: Placement, host_of_rank: np.ndarray) -> RangeColumns:
    """Split every shard into ranges and assign each to one rank; see Note [Write balancing].

    Args:
        held: Shards and their replicas.
        placement: File and offset of each tensor.
        host_of_rank: Host index of each rank.
    """
    parts = in_file_order(held, placement)
    host_of_file = choose_hosts(
        parts.file, parts.num_bytes, parts.holders, held.holder_sets, placement.num_files, host_of_rank
    )
    host = host_of_file[parts.file]
    holders, usable = usable_holders(host, parts.holders, held.holder_sets, host_of_rank)
    parts = replace(parts, holders=holders)
    sets = _HolderSets(usable, len(host_of_rank))
    cuts = _cut_regions(parts, sets)
    part, begin, end = _pieces(parts, cuts)
    owner = _owners(parts, sets, cuts, part, begin)
    itemsize, start = parts.itemsize[part], parts.start[part]
    return RangeColumns(
        owner=owner,
        writer=writers_of(owner, host[part], host_of_rank),
        slice_index=held.slices.of(parts.number[part], owner),
        tensor=parts.tensor[part],
        file=parts.file[part],
        box=parts.box[part],
        start=start + begin // itemsize,
        stop=start + end // itemsize,
    )


def _cut_regions(parts: PlacedParts, sets: _HolderSets) -> _Cuts:
    """Return the split points of regions with several replicas; see Note [Write balancing]."""
    part, region = _parts_by_region(parts, sets)
    num_bytes = parts.num_bytes[part]
    reached = np.cumsum(num_bytes) - num_bytes
    first = np.flatnonzero(changes(region))
    sizes = np.add.reduceat(num_bytes, first) if len(first) else num_bytes
    place = np.where(parts.is_strided[part], reached - reached[first][region], parts.position[part])
    last = np.append(first[1:], len(part)) - 1
    lengths = (place + num_bytes)[last] + PAGE_BYTES if len(first) else num_bytes
    shift = np.cumsum(lengths) - lengths

    holders = parts.holders[part[first]]
    region_of_cut = np.repeat(np.arange(len(first)), sets.sizes[holders] - 1)
    number = np.arange(len(region_of_cut)) - np.searchsorted(region_of_cut, region_of_cut) + 1
    share = sets.sizes[holders][region_of_cut]
    size = sizes[region_of_cut]
    wanted = reached[first][region_of_cut] + size // share * number + size % share * number // share
    row = np.searchsorted(reached, wanted, side="right") - 1
    cut = place[row] + wanted - reached[row]
    cut = (cut + PAGE_BYTES // 2) // PAGE_BYTES * PAGE_BYTES
    return _Cuts(
        part=part,
        place=place + shift[region],
        region=region,
        holders=holders,
        cut=cut + shift[region_of_cut],
        region_of_cut=region_of_cut,
    )


def _parts_by_region(parts: PlacedParts, sets: _HolderSets) -> tuple[np.ndarray, np.ndarray]:
    """Return the shards of regions large enough to split, by region and file order, and the region of each."""
    key = (parts.file * len(sets.sizes) + parts.holders) * 2 + parts.is_strided
    _, region = np.unique(key, return_inverse=True)
    sizes = np.bincount(region, weights=parts.num_bytes)
    is_divided = (sizes[region] >= _MIN_REGION_BYTES) & (sets.sizes[parts.holders] > 1)
    part = np.flatnonzero(is_divided)
    part = part[np.argsort(region[part], kind="stable")]
    return part, np.cumsum(changes(region[part])) - 1


def _pieces(parts: PlacedParts, cuts: _Cuts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return shard, first byte and last byte within the shard, for each range between split points or block ends."""
    part_of_block, block = _blocks(parts)
    row = np.searchsorted(cuts.place, cuts.cut, side="right") - 1
    offset = cuts.cut - cuts.place[row]
    # A split point may lie before, between or after the shards of its region, and then splits none.
    is_inside = (row >= 0) & (offset < parts.num_bytes[cuts.part[row]])
    part = np.concatenate([part_of_block, cuts.part[row[is_inside]]])
    begin = np.concatenate([block, offset[is_inside]])
    order = np.lexsort((begin, part))
    order = order[changes(part[order], begin[order])]
    part, begin = part[order], begin[order]
    is_last = np.append(part[1:] != part[:-1], True)[: len(part)]
    return part, begin, np.where(is_last, parts.num_bytes[part], np.roll(begin, -1))


def _blocks(parts: PlacedParts) -> tuple[np.ndarray, np.ndarray]:
    """Return shard and first byte of every block, aligned in the file or, for strided shards, within the shard."""
    origin = np.where(parts.is_strided, 0, parts.position)
    first = origin // BLOCK_BYTES
    counts = (origin + parts.num_bytes - 1) // BLOCK_BYTES - first + 1
    part = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)
    return part, np.maximum((first[part] + number) * BLOCK_BYTES - origin[part], 0)


def _owners(parts: PlacedParts, sets: _HolderSets, cuts: _Cuts, part: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """Return the owner of each range: by split points in split regions, else the shard's primary or its substitute."""
    row_of_part = np.full(len(parts.number), -1, dtype=np.int64)
    row_of_part[cuts.part] = np.arange(len(cuts.part))
    row = row_of_part[part]
    owner = sets.standing_for(parts.primary[part], parts.holders[part])
    divided = np.flatnonzero(row >= 0)
    row = row[divided]
    region = cuts.region[row]
    passed = np.searchsorted(cuts.cut, cuts.place[row] + begin[divided], side="right")
    passed -= np.searchsorted(cuts.region_of_cut, region)
    owner[divided] = sets.member(cuts.holders[region], passed)
    return owner
