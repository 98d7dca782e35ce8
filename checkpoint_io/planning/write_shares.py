"""How the writing is divided: parts cut into ranges, each with the rank that owns and the rank that writes it."""

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
_MIN_REGION_BYTES = 2**20  # smaller ones are not worth another rank's write

# Note [Regions]: all parts of one file that the same ranks hold form a region. Its bytes, in file order, are divided
# evenly: each of the ranks takes one stretch of them, in rank order. The cuts lie at multiples of a page in the file,
# so that every rank can write whole pages past the page cache. What a strided box holds lies scattered in the file:
# such parts are regions of their own, laid end to end in slice order, and cut at multiples of a page there.
# Offsets are multiples of the item size everywhere, because wide formats come first in a file and all sizes are powers
# of two; so no cut falls into an element.


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeColumns:
    """Ranges in the order of the plan, as int64 columns: see `WriteRange`; `start` and `stop` are its span."""

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
    """Where regions are cut. The regions are laid end to end, so that places ascend through all of them.

    Attributes:
        part: The parts of regions, by region and place.
        place: Where each of `part` begins.
        region: Region of each of `part`, from 0 on.
        holders: For each region which of the sets of holders.
        cut: Where regions are cut, one cut less than the region has holders.
        region_of_cut: Region of each of `cut`.
    """

    part: np.ndarray
    place: np.ndarray
    region: np.ndarray
    holders: np.ndarray
    cut: np.ndarray
    region_of_cut: np.ndarray


class _HolderSets:
    """Sets of ranks, laid end to end."""

    def __init__(self, sets: Sequence[np.ndarray], num_ranks: int) -> None:
        self.sizes = np.array([len(ranks) for ranks in sets], dtype=np.int64)
        self._firsts = np.cumsum(self.sizes) - self.sizes
        self._ranks = np.concatenate([np.zeros(0, dtype=np.int64), *sets])
        self._num_ranks = num_ranks
        self._keys = np.repeat(np.arange(len(sets)), self.sizes) * num_ranks + self._ranks

    def member(self, number: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Returns for each set and place the rank at that place of the set."""
        ranks: np.ndarray = self._ranks[self._firsts[number] + place]
        return ranks

    def standing_for(self, rank: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Returns each rank, or where it is not of the set, one of the set in its stead."""
        is_member = np.isin(number * self._num_ranks + rank, self._keys)
        return np.where(is_member, rank, self.member(number, rank % self.sizes[number]))


def divide(held: HeldParts, placement: Placement, host_of_rank: np.ndarray) -> RangeColumns:
    """Returns the ranges: every part cut up, and each piece given to one rank; see Note [Regions].

    Args:
        held: The parts and who holds them.
        placement: Where each tensor's bytes go.
        host_of_rank: Number of each rank's host.
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
    """Returns where regions that several ranks hold are cut; see Note [Regions]."""
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
    """Returns the parts of regions worth dividing, by region and in file order, and the region of each from 0 on."""
    key = (parts.file * len(sets.sizes) + parts.holders) * 2 + parts.is_strided
    _, region = np.unique(key, return_inverse=True)
    sizes = np.bincount(region, weights=parts.num_bytes)
    is_divided = (sizes[region] >= _MIN_REGION_BYTES) & (sets.sizes[parts.holders] > 1)
    part = np.flatnonzero(is_divided)
    part = part[np.argsort(region[part], kind="stable")]
    return part, np.cumsum(changes(region[part])) - 1


def _pieces(parts: PlacedParts, cuts: _Cuts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns part, first and last byte within the part of each piece between two cuts or ends of blocks."""
    part_of_block, block = _blocks(parts)
    row = np.searchsorted(cuts.place, cuts.cut, side="right") - 1
    offset = cuts.cut - cuts.place[row]
    # A cut may lie before, between or after the parts of its region, and then cuts none.
    is_inside = (row >= 0) & (offset < parts.num_bytes[cuts.part[row]])
    part = np.concatenate([part_of_block, cuts.part[row[is_inside]]])
    begin = np.concatenate([block, offset[is_inside]])
    order = np.lexsort((begin, part))
    order = order[changes(part[order], begin[order])]
    part, begin = part[order], begin[order]
    is_last = np.append(part[1:] != part[:-1], True)[: len(part)]
    return part, begin, np.where(is_last, parts.num_bytes[part], np.roll(begin, -1))


def _blocks(parts: PlacedParts) -> tuple[np.ndarray, np.ndarray]:
    """Returns part and first byte within it of every block, counted in the file or, for strided parts, in the part."""
    origin = np.where(parts.is_strided, 0, parts.position)
    first = origin // BLOCK_BYTES
    counts = (origin + parts.num_bytes - 1) // BLOCK_BYTES - first + 1
    part = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)
    return part, np.maximum((first[part] + number) * BLOCK_BYTES - origin[part], 0)


def _owners(parts: PlacedParts, sets: _HolderSets, cuts: _Cuts, part: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """Returns the owner of each piece: by the cuts in divided regions, else the part's primary or who stands for it."""
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
