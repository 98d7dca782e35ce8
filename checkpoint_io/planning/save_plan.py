"""Save plan: file and offset of each tensor, and the rank that writes each range. Pure functions, no communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from booster.checkpoint_io.layout import PAGE_BYTES, FileNames, FilePlan, plan_files
from booster.interface import TensorSpec

from .coverage import Tiles, changes
from .dedup import DedupedShards, dedup_shards
from .slices import Box, SliceTable, run_length, run_start


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOffsets:
    """File and offset of each tensor, as columns indexed by tensor.

    Attributes:
        file: File index.
        offset: Offset in bytes within the file's data section.
        itemsize: Bytes per element.
        shapes: Shape of each tensor.
        num_files: Number of files.
    """

    file: np.ndarray
    offset: np.ndarray
    itemsize: np.ndarray
    shapes: Sequence[tuple[int, ...]]
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlacement(Tiles):
    """Shards in file order.

    Attributes:
        index: Index of the shard in `DedupedShards`.
        file: File index.
        itemsize: Bytes per element.
        num_bytes: Size in bytes.
        is_strided: Whether the shard is more than one run in the file.
        offset: Offset of the first byte in the file's data section.
        primary: Primary rank.
        replicas: Index into the sets of replicas.
    """

    index: np.ndarray
    file: np.ndarray
    itemsize: np.ndarray
    num_bytes: np.ndarray
    is_strided: np.ndarray
    offset: np.ndarray
    primary: np.ndarray
    replicas: np.ndarray


def sort_by_file_offset(deduped: DedupedShards, tensor_offsets: TensorOffsets) -> FilePlacement:
    """Return the shards in file order; a strided shard is placed by its first byte."""
    tiles = deduped.tiles
    numbers: dict[tuple[int, ...], int] = {}
    shape_of = np.array([numbers.setdefault(shape, len(numbers)) for shape in tensor_offsets.shapes], dtype=np.int64)
    distinct = list(numbers)
    keys, pair_of = np.unique(shape_of[tiles.tensor] * len(deduped.boxes) + tiles.box, return_inverse=True)
    pairs = [(distinct[key // len(deduped.boxes)], deduped.boxes[key % len(deduped.boxes)]) for key in keys.tolist()]
    runs = np.array([run_length(shape, box) for shape, box in pairs], dtype=np.int64)[pair_of]
    starts = np.array([run_start(shape, box, 0) for shape, box in pairs], dtype=np.int64)[pair_of]
    logical = starts + tiles.start  # first element in the flattened tensor
    # Beyond the first run of a box, the offset is no longer linear in the element count.
    for row in np.flatnonzero(tiles.start >= runs).tolist():
        shape, box = pairs[pair_of[row]]
        logical[row] = run_start(shape, box, int(tiles.start[row]))
    itemsize = tensor_offsets.itemsize[tiles.tensor]
    placement = FilePlacement(
        tensor=tiles.tensor,
        box=tiles.box,
        start=tiles.start,
        stop=tiles.stop,
        index=np.arange(len(tiles.tensor)),
        file=tensor_offsets.file[tiles.tensor],
        itemsize=itemsize,
        num_bytes=(tiles.stop - tiles.start) * itemsize,
        is_strided=tiles.start // runs != (tiles.stop - 1) // runs,
        offset=tensor_offsets.offset[tiles.tensor] + logical * itemsize,
        primary=deduped.primary,
        replicas=deduped.replicas,
    )
    return placement.select(np.lexsort((placement.offset, placement.file)))


# On a shared file system (NFS), two hosts that write into one file may overwrite each other's pages. So each file is
# assigned to one host. Shards that no rank of the host holds are relayed: the owner sends them to a writer rank there.


def assign_hosts(
    file_of_shard: np.ndarray,
    bytes_of_shard: np.ndarray,
    replicas: np.ndarray,
    replica_sets: Sequence[np.ndarray],
    num_files: int,
    host_of_rank: np.ndarray,
) -> np.ndarray:
    """Assign each file to the host that holds most of its bytes, among hosts below their fair share of bytes.

    Args:
        file_of_shard: File index of each shard.
        bytes_of_shard: Size of each shard.
        replicas: Index into `replica_sets` for each shard.
        replica_sets: Ranks that hold replicas of a shard.
        num_files: Number of files.
        host_of_rank: Host index of each rank.
    """
    num_ranks = np.bincount(host_of_rank)
    sizes = np.bincount(file_of_shard, weights=bytes_of_shard, minlength=num_files)
    # Bytes per file and host that at least one rank of the host holds.
    bytes_per_host = np.zeros((num_files, len(num_ranks)))
    pairs, pair_of = np.unique(file_of_shard * max(len(replica_sets), 1) + replicas, return_inverse=True)
    bytes_of_pair = np.bincount(pair_of, weights=bytes_of_shard)
    for pair, size in zip(pairs.tolist(), bytes_of_pair.tolist(), strict=True):
        file, number = divmod(pair, len(replica_sets))
        bytes_per_host[file, np.unique(host_of_rank[replica_sets[number]])] += size
    fair = sizes.sum() * num_ranks / len(host_of_rank)
    loads = np.zeros(len(num_ranks))
    chosen = np.zeros(num_files, dtype=np.int64)
    for file in np.argsort(-sizes, kind="stable").tolist():
        is_open = (num_ranks > 0) & ((loads < fair) | (sizes[file] == 0))
        # Most bytes held first, then least load; a host index without ranks is never chosen.
        chosen[file] = np.lexsort((loads, -bytes_per_host[file], ~is_open))[0]
        loads[chosen[file]] += sizes[file]
    return chosen


def usable_replicas(
    host_of_shard: np.ndarray, replicas: np.ndarray, replica_sets: Sequence[np.ndarray], host_of_rank: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Restrict replicas to the host of the shard's file, if it has any; return an index per shard and the sets.

    Args:
        host_of_shard: Host of each shard's file.
        replicas: Index into `replica_sets` for each shard.
        replica_sets: Ranks that hold replicas of a shard.
        host_of_rank: Host index of each rank.
    """
    num_hosts = int(host_of_rank.max()) + 1
    pairs, pair_of = np.unique(replicas * num_hosts + host_of_shard, return_inverse=True)
    numbers: dict[bytes, int] = {}
    sets: list[np.ndarray] = []
    number_of_pair = np.empty(len(pairs), dtype=np.int64)
    for index, pair in enumerate(pairs.tolist()):
        number, host = divmod(pair, num_hosts)
        ranks = replica_sets[number]
        local = ranks[host_of_rank[ranks] == host]
        usable = local if len(local) else ranks
        number_of_pair[index] = numbers.setdefault(usable.tobytes(), len(sets))
        if len(numbers) > len(sets):
            sets.append(usable)
    return number_of_pair[pair_of], sets


def assign_writers(owner: np.ndarray, host: np.ndarray, host_of_rank: np.ndarray) -> np.ndarray:
    """Return the rank that writes each range: its owner, or a substitute on the file's host.

    Args:
        owner: Rank that holds each range in memory.
        host: Host of each range's file.
        host_of_rank: Host index of each rank.
    """
    order = np.argsort(host_of_rank, kind="stable")
    num_ranks = np.bincount(host_of_rank)
    first = np.cumsum(num_ranks) - num_ranks
    substitute = order[first[host] + owner % num_ranks[host]]
    return np.where(host_of_rank[owner] == host, owner, substitute)


BLOCK_BYTES = 16 * 2**20
_MIN_REGION_BYTES = 2**20  # below this, a second writer costs more than it saves

# Note [Write balancing]: all shards of one file with the same set of replicas form a region. Its bytes, in file order,
# are split evenly: each rank of the set writes one contiguous range, in rank order. Split points are multiples of the
# page size in the file, so that every rank can write full pages with O_DIRECT. Strided shards are scattered in the file
# and form separate regions, concatenated in slice order and split at page multiples of that order.
# All offsets are multiples of the item size, because wide dtypes come first in a file and item sizes are powers of two;
# so no split point falls inside an element.


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeColumns(Tiles):
    """`WriteRange`s in plan order; `start` and `stop` are the span."""

    owner: np.ndarray
    writer: np.ndarray
    slice_index: np.ndarray
    file: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitPoints:
    """Split points of regions. Regions are concatenated, so that offsets ascend over all of them.

    Attributes:
        shard: Shards of the regions, by region and offset.
        offset: Offset of each of `shard`.
        region: Region of each of `shard`, from 0.
        replicas: Index of the set of replicas, per region.
        split: Split points; one less per region than it has replicas.
        region_of_split: Region of each of `split`.
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
        self.num_ranks = num_ranks
        self.keys = np.repeat(np.arange(len(sets)), self.sizes) * num_ranks + self._ranks

    def member(self, number: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return the rank at each index of each set."""
        ranks: np.ndarray = self._ranks[self._firsts[number] + index]
        return ranks


def balance_writes(deduped: DedupedShards, tensor_offsets: TensorOffsets, host_of_rank: np.ndarray) -> RangeColumns:
    """Split every shard into ranges and assign each to one rank; see Note [Write balancing].

    Args:
        deduped: Shards and their replicas.
        tensor_offsets: File and offset of each tensor.
        host_of_rank: Host index of each rank.
    """
    shards = sort_by_file_offset(deduped, tensor_offsets)
    if len(host_of_rank) == 1:  # one rank writes everything, from its own memory
        shard, begin, end = _split_ranges(shards, None)
        owner = writer = np.zeros(len(shard), dtype=np.int64)
    else:
        shard, begin, end, owner, writer = _share_ranges(shards, deduped.replica_sets, tensor_offsets, host_of_rank)
    itemsize, start = shards.itemsize[shard], shards.start[shard]
    return RangeColumns(
        owner=owner,
        writer=writer,
        slice_index=deduped.slice_indices.lookup(shards.index[shard], owner),
        tensor=shards.tensor[shard],
        file=shards.file[shard],
        box=shards.box[shard],
        start=start + begin // itemsize,
        stop=start + end // itemsize,
    )


def _share_ranges(
    shards: FilePlacement, replica_sets: Sequence[np.ndarray], tensor_offsets: TensorOffsets, host_of_rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return shard, first byte and last byte within the shard, owner and writer of each range."""
    host_of_file = assign_hosts(
        shards.file, shards.num_bytes, shards.replicas, replica_sets, tensor_offsets.num_files, host_of_rank
    )
    host = host_of_file[shards.file]
    replicas, usable = usable_replicas(host, shards.replicas, replica_sets, host_of_rank)
    shards = replace(shards, replicas=replicas)
    sets = _ReplicaSets(usable, len(host_of_rank))
    splits = _split_regions(shards, sets)
    shard, begin, end = _split_ranges(shards, splits)
    owner = _owners(shards, sets, splits, shard, begin)
    return shard, begin, end, owner, assign_writers(owner, host[shard], host_of_rank)


def _split_regions(shards: FilePlacement, sets: _ReplicaSets) -> _SplitPoints:
    """Return the split points of regions with several replicas; see Note [Write balancing]."""
    # Regions large enough to split, by region and file order.
    key = (shards.file * len(sets.sizes) + shards.replicas) * 2 + shards.is_strided
    _, region = np.unique(key, return_inverse=True)
    region_bytes = np.bincount(region, weights=shards.num_bytes)
    is_split = (region_bytes[region] >= _MIN_REGION_BYTES) & (sets.sizes[shards.replicas] > 1)
    shard = np.flatnonzero(is_split)
    shard = shard[np.argsort(region[shard], kind="stable")]
    region = np.cumsum(changes(region[shard])) - 1

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


def _split_ranges(shards: FilePlacement, splits: _SplitPoints | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return shard, first byte and last byte within the shard, for each range between split points or block ends."""
    # Blocks are aligned in the file or, for strided shards, within the shard.
    origin = np.where(shards.is_strided, 0, shards.offset)
    first = origin // BLOCK_BYTES
    counts = (origin + shards.num_bytes - 1) // BLOCK_BYTES - first + 1
    shard_of_block = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(shard_of_block)) - np.repeat(np.cumsum(counts) - counts, counts)
    shard = shard_of_block
    begin = np.maximum((first[shard_of_block] + number) * BLOCK_BYTES - origin[shard_of_block], 0)
    if splits is not None:
        row = np.searchsorted(splits.offset, splits.split, side="right") - 1
        offset = splits.split - splits.offset[row]
        # A split point may lie before, between or after the shards of its region, and then splits none.
        is_inside = (row >= 0) & (offset < shards.num_bytes[splits.shard[row]])
        shard = np.concatenate([shard, splits.shard[row[is_inside]]])
        begin = np.concatenate([begin, offset[is_inside]])
        order = np.lexsort((begin, shard))
        order = order[changes(shard[order], begin[order])]
        shard, begin = shard[order], begin[order]
    is_last = np.append(shard[1:] != shard[:-1], True)[: len(shard)]
    return shard, begin, np.where(is_last, shards.num_bytes[shard], np.roll(begin, -1))


def _owners(
    shards: FilePlacement, sets: _ReplicaSets, splits: _SplitPoints, shard: np.ndarray, begin: np.ndarray
) -> np.ndarray:
    """Return the owner of each range: by split points in split regions, else the shard's primary or its substitute."""
    row_of_shard = np.full(len(shards.index), -1, dtype=np.int64)
    row_of_shard[splits.shard] = np.arange(len(splits.shard))
    row = row_of_shard[shard]
    primary, number = shards.primary[shard], shards.replicas[shard]
    # A primary that is not in the set, as it is on another host, is replaced by a rank of the set.
    is_member = np.isin(number * sets.num_ranks + primary, sets.keys)
    owner = np.where(is_member, primary, sets.member(number, primary % sets.sizes[number]))
    is_split = np.flatnonzero(row >= 0)
    row = row[is_split]
    region = splits.region[row]
    passed = np.searchsorted(splits.split, splits.offset[row] + begin[is_split], side="right")
    passed -= np.searchsorted(splits.region_of_split, region)
    owner[is_split] = sets.member(splits.replicas[region], passed)
    return owner


_RANGES_PER_BATCH = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRange:
    """Range of a tensor that one rank writes, at most `BLOCK_BYTES` long.

    Attributes:
        owner: Rank that holds it in memory.
        writer: Rank that writes it; differs from the owner if the file is assigned to another host.
        slice_index: Index of the owner's slice that contains it.
        name: Name of the tensor.
        file: Index into the plan's files.
        box: Box of the slice.
        span: Flat range (start, stop) within the row-major flattening of the box.
    """

    owner: int
    writer: int
    slice_index: int
    name: str
    file: int
    box: Box
    span: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """Tensor file.

    Attributes:
        name: File name.
        tensors: Tensors in file order: wide dtypes first, then in plan order.
        starts: Offset of each tensor in bytes within the data section; there are no gaps.
        data_bytes: Total size of the tensors.
    """

    name: str
    tensors: dict[str, TensorSpec]
    starts: dict[str, int]
    data_bytes: int


class SavePlan:
    """Save plan: files, tensors and write ranges. Identical on every rank; built by `plan_save`.

    Attributes:
        files: Tensor files.
        index: Name of the index file, or None without one.
        specs: Dtype and shape of every tensor, in the order of the ranks' tables.
        total_bytes: Total size of the tensors.
    """

    def __init__(
        self,
        files: list[PlannedFile],
        index: str | None,
        specs: dict[str, TensorSpec],
        boxes: list[Box],
        ranges: RangeColumns,
    ) -> None:
        self.files = files
        self.index = index
        self.specs = specs
        self.total_bytes = sum(file.data_bytes for file in files)
        self._names = list(specs)
        self._boxes = boxes
        self._ranges = ranges

    def ranges_written_by(self, rank: int) -> list[WriteRange]:
        """Return the ranges that `rank` writes, in plan order."""
        return list(self._at(np.flatnonzero(self._ranges.writer == rank)))

    def ranges_owned_by(self, rank: int) -> list[WriteRange]:
        """Return the ranges that `rank` holds in memory, in plan order."""
        return list(self._at(np.flatnonzero(self._ranges.owner == rank)))

    def all_ranges(self) -> Iterator[WriteRange]:
        """Yield every range once, in plan order: by file, then by tensor in file order."""
        for first in range(0, len(self._ranges.owner), _RANGES_PER_BATCH):
            yield from self._at(np.arange(first, min(first + _RANGES_PER_BATCH, len(self._ranges.owner))))

    def _at(self, rows: np.ndarray) -> Iterator[WriteRange]:
        columns = self._ranges
        for tensor, box, start, stop, owner, writer, slice_index, file in zip(
            *(getattr(columns, column.name)[rows].tolist() for column in fields(columns)), strict=True
        ):
            yield WriteRange(
                owner=owner,
                writer=writer,
                slice_index=slice_index,
                name=self._names[tensor],
                file=file,
                box=self._boxes[box],
                span=(start, stop),
            )


def plan_save(
    tables: Sequence[SliceTable],
    table_of_rank: Sequence[int],
    names: FileNames,
    *,
    max_shard_bytes: int,
    is_sharded: bool,
    always_index: bool,
    host_of_rank: Sequence[int] | None = None,
) -> SavePlan:
    """Compute the save plan.

    Args:
        tables: Distinct slice tables of all ranks.
        table_of_rank: Index into `tables` for each rank.
        names: File names.
        max_shard_bytes: Maximum file size; a single larger tensor gets its own larger file.
        is_sharded: If True, number the files and write an index if there is more than one. If False, write one file.
        always_index: If True, number the files and write an index even for a single file.
        host_of_rank: Host index of each rank; a file is written by ranks of one host only. Optional, defaults to a
            single host.

    Raises:
        CheckpointError: Ranks disagree about a tensor, or the primary slices do not cover every element of every
            tensor exactly once.
    """
    deduped = dedup_shards(tables, table_of_rank)
    sizes = {name: math.prod(spec.shape) * spec.dtype.itemsize for name, spec in deduped.specs.items()}
    planned = FilePlan(files={names.single: tuple(sizes)}, index=None)
    if is_sharded:
        planned = plan_files(sizes, names, max_shard_bytes=max_shard_bytes, always_index=always_index)
    files = [_planned_file(name, tensors, deduped.specs, sizes) for name, tensors in planned.files.items()]
    hosts = np.zeros(len(table_of_rank), dtype=np.int64)
    if host_of_rank is not None:
        hosts = np.unique(np.array(host_of_rank, dtype=np.int64), return_inverse=True)[1]
    ranges = balance_writes(deduped, _tensor_offsets(files, deduped.specs), hosts)
    return SavePlan(files, planned.index, deduped.specs, deduped.boxes, ranges)


def _planned_file(
    name: str, tensors: Sequence[str], specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]
) -> PlannedFile:
    # Wide dtypes first, as in `encode_header`: every tensor is aligned to its element size without gaps.
    ordered = sorted(tensors, key=lambda tensor: -specs[tensor].dtype.itemsize)
    stops = list(itertools.accumulate((sizes[tensor] for tensor in ordered), initial=0))
    return PlannedFile(
        name=name,
        tensors={tensor: specs[tensor] for tensor in ordered},
        starts=dict(zip(ordered, stops, strict=False)),
        data_bytes=stops[-1],
    )


def _tensor_offsets(files: Sequence[PlannedFile], specs: Mapping[str, TensorSpec]) -> TensorOffsets:
    file_and_offset = {
        name: (number, start) for number, file in enumerate(files) for name, start in file.starts.items()
    }
    columns = np.array([file_and_offset[name] for name in specs], dtype=np.int64).reshape(-1, 2)
    return TensorOffsets(
        file=columns[:, 0],
        offset=columns[:, 1],
        itemsize=np.array([spec.dtype.itemsize for spec in specs.values()], dtype=np.int64),
        shapes=[spec.shape for spec in specs.values()],
        num_files=len(files),
    )
