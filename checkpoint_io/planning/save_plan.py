"""Save plan: file and offset of each tensor, and the rank that writes each range. Pure functions, no communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from booster.checkpoint_io.layout import PAGE_BYTES, FileNames, FilePlan, plan_files
from booster.interface import TensorSpec

from .dedup import DedupedShards, dedup_shards
from .slices import Box, PlanTable, SliceTable, changes, run_length, run_start


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


def place_in_files(deduped: DedupedShards, files: Sequence[PlannedFile]) -> PlanTable:
    """Return the shards in file order, with `file`, `offset`, `num_bytes` and `is_strided`.

    A strided shard is placed by its first byte.
    """
    shards, boxes, specs = deduped.shards, deduped.boxes, deduped.specs
    numbers: dict[tuple[int, ...], int] = {}
    shape_of = np.array([numbers.setdefault(spec.shape, len(numbers)) for spec in specs.values()], dtype=np.int64)
    distinct = list(numbers)
    keys, pair_of = np.unique(shape_of[shards.tensor] * len(boxes) + shards.box, return_inverse=True)
    pairs = [(distinct[key // len(boxes)], boxes[key % len(boxes)]) for key in keys.tolist()]
    runs = np.array([run_length(shape, box) for shape, box in pairs], dtype=np.int64)[pair_of]
    starts = np.array([run_start(shape, box, 0) for shape, box in pairs], dtype=np.int64)[pair_of]
    logical = starts + shards.start  # first element in the flattened tensor
    # Beyond the first run of a box, the offset is no longer linear in the element count.
    for row in np.flatnonzero(shards.start >= runs).tolist():
        shape, box = pairs[pair_of[row]]
        logical[row] = run_start(shape, box, int(shards.start[row]))
    places = {name: (number, start) for number, file in enumerate(files) for name, start in file.starts.items()}
    place = np.array([places[name] for name in specs], dtype=np.int64).reshape(-1, 2)[shards.tensor]
    itemsize = np.array([spec.dtype.itemsize for spec in specs.values()], dtype=np.int64)[shards.tensor]
    placed = replace(
        shards,
        file=place[:, 0],
        offset=place[:, 1] + logical * itemsize,
        num_bytes=(shards.stop - shards.start) * itemsize,
        is_strided=shards.start // runs != (shards.stop - 1) // runs,
    )
    return placed.select(np.lexsort((placed.offset, placed.file)))


# On a shared file system (NFS), two hosts that write into one file may overwrite each other's pages. So each file is
# assigned to one host. Shards that no rank of the host holds are relayed: the owner sends them to a writer rank there.


def _assign_hosts(
    shards: PlanTable, replica_sets: Sequence[np.ndarray], num_files: int, host_of_rank: np.ndarray
) -> np.ndarray:
    """Assign each file to the host that holds most of its bytes, among hosts below their fair share of bytes."""
    num_ranks = np.bincount(host_of_rank)
    sizes = np.bincount(shards.file, weights=shards.num_bytes, minlength=num_files)
    # Bytes per file and host that at least one rank of the host holds.
    bytes_per_host = np.zeros((num_files, len(num_ranks)))
    pairs, pair_of = np.unique(shards.file * max(len(replica_sets), 1) + shards.replicas, return_inverse=True)
    bytes_of_pair = np.bincount(pair_of, weights=shards.num_bytes)
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


def _usable_replicas(
    host_of_shard: np.ndarray, replicas: np.ndarray, replica_sets: Sequence[np.ndarray], host_of_rank: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Restrict replicas to the host of the shard's file, if it has any; return an index per shard and the sets."""
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


def _assign_writers(owner: np.ndarray, host: np.ndarray, host_of_rank: np.ndarray) -> np.ndarray:
    """Return the rank that writes each range: its owner, or a substitute on the file's host."""
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
class _SplitPoints:
    """Split points of regions. Regions are concatenated, so that offsets ascend over all of them."""

    shard: np.ndarray  # by region and offset
    offset: np.ndarray  # of each of `shard`
    region: np.ndarray  # of each of `shard`, from 0
    replicas: np.ndarray  # index of the set of replicas, per region
    split: np.ndarray  # one less per region than it has replicas
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


def balance_writes(deduped: DedupedShards, shards: PlanTable, num_files: int, host_of_rank: np.ndarray) -> PlanTable:
    """Split every shard into ranges and assign each to one rank; see Note [Write balancing].

    Args:
        deduped: Shards and their replicas.
        shards: Shards in file order.
        num_files: Number of files.
        host_of_rank: Host index of each rank.

    Returns:
        The ranges in plan order, with `file`, `owner`, `writer` and `slice_index`.
    """
    if deduped.replicas is None:  # one rank writes everything, from its own memory
        shard, begin, end = _split_ranges(shards, None)
        owner = writer = np.zeros(len(shard), dtype=np.int64)
        slice_index = shards.slice_index[shard]
    else:
        shard, begin, end, owner, writer = _share_ranges(shards, deduped.replicas.sets, num_files, host_of_rank)
        slice_index = deduped.replicas.slice_of(shards.shard[shard], owner)
    ranges = shards.select(shard)
    itemsize = ranges.num_bytes // (ranges.stop - ranges.start)
    return PlanTable(
        tensor=ranges.tensor,
        box=ranges.box,
        start=ranges.start + begin // itemsize,
        stop=ranges.start + end // itemsize,
        file=ranges.file,
        owner=owner,
        writer=writer,
        slice_index=slice_index,
    )


def _share_ranges(
    shards: PlanTable, replica_sets: Sequence[np.ndarray], num_files: int, host_of_rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return shard, first byte and last byte within the shard, owner and writer of each range."""
    host_of_file = _assign_hosts(shards, replica_sets, num_files, host_of_rank)
    host = host_of_file[shards.file]
    replicas, usable = _usable_replicas(host, shards.replicas, replica_sets, host_of_rank)
    shards = replace(shards, replicas=replicas)
    sets = _ReplicaSets(usable, len(host_of_rank))
    splits = _split_regions(shards, sets)
    shard, begin, end = _split_ranges(shards, splits)
    owner = _owners(shards, sets, splits, shard, begin)
    return shard, begin, end, owner, _assign_writers(owner, host[shard], host_of_rank)


def _split_regions(shards: PlanTable, sets: _ReplicaSets) -> _SplitPoints:
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


def _split_ranges(shards: PlanTable, splits: _SplitPoints | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    shards: PlanTable, sets: _ReplicaSets, splits: _SplitPoints, shard: np.ndarray, begin: np.ndarray
) -> np.ndarray:
    """Return the owner of each range: by split points in split regions, else the shard's primary or its substitute."""
    row_of_shard = np.full(len(shards.tensor), -1, dtype=np.int64)
    row_of_shard[splits.shard] = np.arange(len(splits.shard))
    row = row_of_shard[shard]
    primary, number = shards.owner[shard], shards.replicas[shard]
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavePlan:
    """Save plan: files, tensors and write ranges. Identical on every rank; built by `plan_save`.

    Attributes:
        layout: Tensors by file, and the name of the index.
        files: Tensor files.
        specs: Dtype and shape of every tensor, in the order of the ranks' tables.
        boxes: Distinct boxes.
        table: Ranges in plan order.
    """

    layout: FilePlan
    files: list[PlannedFile]
    specs: dict[str, TensorSpec]
    boxes: list[Box]
    table: PlanTable

    def ranges(self, *, owner: int | None = None, writer: int | None = None) -> Iterator[WriteRange]:
        """Yield ranges in plan order: by file, then by tensor in file order.

        Args:
            owner: Only those that this rank holds in memory. Optional, defaults to all.
            writer: Only those that this rank writes. Optional, defaults to all.
        """
        table, names = self.table, list(self.specs)
        rows = np.arange(len(table.tensor))
        if owner is not None:
            rows = rows[table.owner[rows] == owner]
        if writer is not None:
            rows = rows[table.writer[rows] == writer]
        for first in range(0, len(rows), _RANGES_PER_BATCH):
            batch = rows[first : first + _RANGES_PER_BATCH]
            columns = (table.tensor, table.box, table.start, table.stop, table.owner, table.writer)
            for tensor, box, start, stop, owned_by, written_by, slice_index, file in zip(
                *(column[batch].tolist() for column in (*columns, table.slice_index, table.file)), strict=True
            ):
                yield WriteRange(
                    owner=owned_by,
                    writer=written_by,
                    slice_index=slice_index,
                    name=names[tensor],
                    file=file,
                    box=self.boxes[box],
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
    specs = deduped.specs
    sizes = {name: math.prod(spec.shape) * spec.dtype.itemsize for name, spec in specs.items()}
    layout = FilePlan(files={names.single: tuple(sizes)}, index=None)
    if is_sharded:
        layout = plan_files(sizes, names, max_shard_bytes=max_shard_bytes, always_index=always_index)
    files = []
    for file_name, tensors in layout.files.items():
        # Wide dtypes first, as in `encode_header`: every tensor is aligned to its element size without gaps.
        ordered = sorted(tensors, key=lambda name: -specs[name].dtype.itemsize)
        stops = list(itertools.accumulate((sizes[name] for name in ordered), initial=0))
        file = PlannedFile(
            name=file_name,
            tensors={name: specs[name] for name in ordered},
            starts=dict(zip(ordered, stops, strict=False)),
            data_bytes=stops[-1],
        )
        files.append(file)
    hosts = np.zeros(len(table_of_rank), dtype=np.int64)
    if host_of_rank is not None:
        hosts = np.unique(np.array(host_of_rank, dtype=np.int64), return_inverse=True)[1]
    table = balance_writes(deduped, place_in_files(deduped, files), len(files), hosts)
    return SavePlan(layout=layout, files=files, specs=specs, boxes=deduped.boxes, table=table)
