"""Deduplication of replicated shards: the slice tables of all ranks, merged into the shards to write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from booster.comm import fake
from booster.errors import CheckpointError
from booster.interface import TensorSpec

from .coverage import CoverageLimitError, Tiles, changes, check_coverage, contains
from .slices import Box, SliceTable

_MAX_BYTES = 2**62

# Note [Shards and replicas]: a shard is one box and span of one tensor, on any number of ranks. It is written if it is
# primary on one rank. Its replicas are on that rank and, if all copies are marked shared (bitwise equal), on the other
# ranks with the same box and span. Ranks with equal tables hold the same shards, so all work is per distinct table: a
# thousand ranks with a hundred thousand replicated tensors cost no more than the few tables they share.


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupedShards:
    """Shards to write, without duplicates; see Note [Shards and replicas].

    Attributes:
        specs: Dtype and shape of each tensor by name, in the order of the ranks' tables.
        boxes: Distinct boxes.
        tiles: Tensor, box and span of each shard.
        primary: Primary rank of each shard.
        replicas: Index into `replica_sets` for each shard.
        replica_sets: Ranks that hold replicas of a shard, ascending.
        slice_indices: Mapping of shard and rank to the rank's slice.
    """

    specs: dict[str, TensorSpec]
    boxes: list[Box]
    tiles: Tiles
    primary: np.ndarray
    replicas: np.ndarray
    replica_sets: list[np.ndarray]
    slice_indices: SliceIndices


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceIndices:
    """Mapping of shard and rank to the index of the rank's slice; `keys` ascend, one per shard and table."""

    keys: np.ndarray
    indices: np.ndarray
    table_of_rank: np.ndarray

    def lookup(self, shard: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return the slice index for each pair of a shard and a rank that holds it."""
        tables = int(self.table_of_rank.max(initial=0)) + 1
        found: np.ndarray = self.indices[np.searchsorted(self.keys, shard * tables + self.table_of_rank[rank])]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows(Tiles):
    """Slices of all distinct tables; `number` is the index within the table."""

    spec: np.ndarray
    table: np.ndarray
    number: np.ndarray
    is_primary: np.ndarray
    is_shared: np.ndarray


def dedup_shards(tables: Sequence[SliceTable], table_of_rank: Sequence[int]) -> DedupedShards:
    """Return the shards to write and their replicas, after checking that they tile every tensor.

    Args:
        tables: Distinct slice tables.
        table_of_rank: Index into `tables` for each rank.

    Raises:
        CheckpointError: Ranks disagree about a tensor, or the primary shards do not cover every element exactly once.
    """
    of_rank = np.array(table_of_rank, dtype=np.int64)
    by_table = np.argsort(of_rank, kind="stable")
    ranks_of = np.split(by_table, np.searchsorted(of_rank[by_table], np.arange(1, len(tables))))
    names, specs, boxes, rows = _merge(tables, of_rank)
    tensor_specs = _verify_specs(names, specs, rows, ranks_of)
    rows = rows.select(np.flatnonzero(rows.start < rows.stop))
    rows = rows.select(np.lexsort((rows.number, rows.table, rows.stop, rows.start, rows.box, rows.tensor)))
    written, shard = _primary_rows(names, boxes, rows, ranks_of)
    shards = written.select(np.flatnonzero(written.is_primary))
    tiles = Tiles(tensor=shards.tensor, box=shards.box, start=shards.start, stop=shards.stop)
    if fake.replicas is None:  # what the other ranks hold alone is unknown there
        _check_coverage(names, tensor_specs, boxes, tiles, rows, ranks_of)
    # If the primary's copy is not marked shared, it has no replicas.
    is_replica = written.is_primary | (written.is_shared & shards.is_shared[shard])
    is_replica[is_replica] = changes(shard[is_replica], written.table[is_replica])
    shard, table = shard[is_replica], written.table[is_replica]
    replicas, sets = _replica_sets(shard, table, len(shards.tensor))
    return DedupedShards(
        specs=dict(zip(names, tensor_specs, strict=True)),
        boxes=boxes,
        tiles=tiles,
        primary=np.array([ranks[0] if len(ranks) else -1 for ranks in ranks_of], dtype=np.int64)[shards.table],
        replicas=replicas,
        replica_sets=[np.sort(np.concatenate([ranks_of[number] for number in numbers])) for numbers in sets],
        slice_indices=SliceIndices(
            keys=shard * (int(of_rank.max(initial=0)) + 1) + table,
            indices=written.number[is_replica],
            table_of_rank=of_rank,
        ),
    )


def _merge(
    tables: Sequence[SliceTable], table_of_rank: np.ndarray
) -> tuple[list[str], list[TensorSpec], list[Box], _Rows]:
    """Return the distinct names, specs and boxes of all tables, and all slices, in rank order."""
    names: dict[str, int] = {}
    specs: dict[TensorSpec, int] = {}
    boxes: dict[Box, int] = {}
    columns: dict[str, list[np.ndarray]] = {field.name: [np.zeros(0, np.int64)] for field in fields(_Rows)}
    for number in dict.fromkeys(table_of_rank.tolist()):
        table = tables[number]
        spec_numbers = np.array([specs.setdefault(spec, len(specs)) for spec in table.specs], dtype=np.int64)
        box_numbers = np.array([boxes.setdefault(box, len(boxes)) for box in table.boxes], dtype=np.int64)
        columns["tensor"].append(np.array([names.setdefault(name, len(names)) for name in table.names], np.int64))
        columns["spec"].append(spec_numbers[table.spec_of])
        columns["box"].append(box_numbers[table.box_of])
        columns["start"].append(table.starts)
        columns["stop"].append(table.stops)
        columns["table"].append(np.full(len(table), number, dtype=np.int64))
        columns["number"].append(np.arange(len(table), dtype=np.int64))
        columns["is_primary"].append(table.is_primary)
        columns["is_shared"].append(table.is_shared)
    merged = {name: np.concatenate(column) for name, column in columns.items()}
    merged["is_primary"], merged["is_shared"] = merged["is_primary"] != 0, merged["is_shared"] != 0
    return list(names), list(specs), list(boxes), _Rows(**merged)


def _verify_specs(
    names: list[str], specs: list[TensorSpec], rows: _Rows, ranks_of: list[np.ndarray]
) -> list[TensorSpec]:
    first = np.unique(rows.tensor, return_index=True)[1]
    other = np.flatnonzero(rows.spec != rows.spec[first][rows.tensor])
    if len(other):
        first_row, other_row = int(first[rows.tensor[other[0]]]), int(other[0])
        raise CheckpointError(
            f"{names[rows.tensor[other_row]]!r} is {_format_spec(specs[rows.spec[first_row]])} on rank"
            f" {ranks_of[rows.table[first_row]][0]} and {_format_spec(specs[rows.spec[other_row]])} on rank"
            f" {ranks_of[rows.table[other_row]][0]}, so nothing was written: build the same model on all ranks"
        )
    found = [specs[number] for number in rows.spec[first].tolist()]
    total_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in found)
    if total_bytes > _MAX_BYTES:
        raise CheckpointError(f"the tensors have {total_bytes} bytes, above the limit of 2**62: check their shapes")
    return found


def _primary_rows(
    names: list[str], boxes: list[Box], rows: _Rows, ranks_of: list[np.ndarray]
) -> tuple[_Rows, np.ndarray]:
    """Return the rows of shards that are primary on one rank, and the shard index of each row."""
    is_new = changes(rows.tensor, rows.box, rows.start, rows.stop)
    shard = np.cumsum(is_new) - 1
    num_ranks = np.array([len(ranks) for ranks in ranks_of], dtype=np.int64)
    weights = np.where(rows.is_primary, num_ranks[rows.table], 0)
    primaries = np.bincount(shard, weights=weights).astype(np.int64)
    if (primaries > 1).any():
        same = rows.select(np.flatnonzero((shard == np.argmax(primaries > 1)) & rows.is_primary))
        box, span = boxes[same.box[0]], (int(same.start[0]), int(same.stop[0]))
        raise CheckpointError(
            f"elements {span[0]} to {span[1]} of box {box} of {names[same.tensor[0]]!r} are marked primary"
            f" {primaries.max()} times, by {_format_ranks(same, ranks_of)}, so nothing was written: mark each shard"
            " primary on exactly one rank, by `is_primary` of the model's or optimizer's wrapper"
        )
    is_written = primaries[shard] == 1
    return rows.select(np.flatnonzero(is_written)), np.cumsum(is_new[is_written]) - 1


def _check_coverage(
    names: list[str],
    specs: list[TensorSpec],
    boxes: list[Box],
    tiles: Tiles,
    rows: _Rows,
    ranks_of: list[np.ndarray],
) -> None:
    try:
        violation = check_coverage([spec.shape for spec in specs], boxes, tiles)
    except CoverageLimitError as error:
        raise CheckpointError(f"{names[error.tensor]!r} {error}, so nothing was written: use fewer shards") from None
    if violation is None:
        return
    of_tensor = rows.select(np.flatnonzero(rows.tensor == violation.tensor))
    spans = zip(of_tensor.box.tolist(), of_tensor.start.tolist(), of_tensor.stop.tolist(), strict=True)
    covers = np.array([contains(boxes[box], (start, stop), violation.index) for box, start, stop in spans], dtype=bool)
    element = (
        f"element {violation.index} of {names[violation.tensor]!r}, which is {_format_spec(specs[violation.tensor])},"
    )
    if violation.num_covers > 1:
        ranks = _format_ranks(of_tensor.select(np.flatnonzero(covers & of_tensor.is_primary)), ranks_of)
        raise CheckpointError(
            f"{element} is in more than one primary slice, on {ranks}, so nothing was written: primary slices of a"
            " tensor must not overlap"
        )
    ranks = _format_ranks(of_tensor.select(np.flatnonzero(covers)), ranks_of)
    raise CheckpointError(
        f"{element} is in no primary slice (other copies: {ranks}), so nothing was written: mark each shard primary"
        " on exactly one rank"
    )


def _replica_sets(shard: np.ndarray, table: np.ndarray, num_shards: int) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Return the index of each shard's set of tables, and the sets. Rows are sorted by shard and table."""
    sets: dict[bytes, int] = {}
    edges = np.searchsorted(shard, np.arange(num_shards + 1))
    counts = np.diff(edges)
    found = np.empty(num_shards, dtype=np.int64)
    alone = np.flatnonzero(counts == 1)
    tables, number = np.unique(table[edges[alone]], return_inverse=True)
    found[alone] = np.array([sets.setdefault(one.tobytes(), len(sets)) for one in tables], dtype=np.int64)[number]
    several = np.flatnonzero(counts > 1)
    bounds = zip(edges[several].tolist(), edges[several + 1].tolist(), strict=True)
    found[several] = [sets.setdefault(table[begin:end].tobytes(), len(sets)) for begin, end in bounds]
    return found, [tuple(np.frombuffer(raw, dtype=np.int64).tolist()) for raw in sets]


def _format_spec(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} of shape {spec.shape}"


def _format_ranks(rows: _Rows, ranks_of: list[np.ndarray]) -> str:
    ranks = sorted({int(rank) for table in rows.table.tolist() for rank in ranks_of[table]})
    if not ranks:
        return "no rank"
    text = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
