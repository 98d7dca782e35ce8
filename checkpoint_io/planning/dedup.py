"""Deduplication of replicated shards: the slice tables of all ranks, merged into the shards to write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from booster.comm import fake
from booster.errors import CheckpointError, format_ranks
from booster.interface import TensorSpec

from .coverage import CoverageLimitError, CoverageViolation, check_coverage, contains
from .slices import Box, PlanTable, SliceTable, changes

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
        shards: Shards: their primary slices, with `shard`, `replicas`, and the primary rank as `owner`.
        replicas: Ranks and slices of the replicas. None for a single rank, which has each shard once.
    """

    specs: dict[str, TensorSpec]
    boxes: list[Box]
    shards: PlanTable
    replicas: Replicas | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Ranks that hold replicas of shards, and their slices.

    Attributes:
        sets: Sets of ranks, each ascending.
        table_of_rank: Slice table of each rank.
        keys: Shard and table of each replica as one number, ascending.
        slice_indices: Index of each replica's slice within its table.
    """

    sets: list[np.ndarray]
    table_of_rank: np.ndarray
    keys: np.ndarray
    slice_indices: np.ndarray

    def slice_of(self, shard: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return the slice index for each pair of a shard and a rank that holds it."""
        num_tables = int(self.table_of_rank.max()) + 1
        rows = np.searchsorted(self.keys, shard * num_tables + self.table_of_rank[rank])
        found: np.ndarray = self.slice_indices[rows]
        return found


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
    specs, boxes, rows = _merge(tables, of_rank, ranks_of)
    names = list(specs)
    rows = rows.select(np.flatnonzero(rows.start < rows.stop))
    rows = rows.select(np.lexsort((rows.slice_index, rows.table, rows.stop, rows.start, rows.box, rows.tensor)))
    is_new = changes(rows.tensor, rows.box, rows.start, rows.stop)
    rows = replace(rows, shard=np.cumsum(is_new) - 1)
    num_ranks = np.array([len(ranks) for ranks in ranks_of], dtype=np.int64)
    num_primaries = np.bincount(rows.shard, weights=np.where(rows.is_primary, num_ranks[rows.table], 0))
    if (num_primaries > 1).any():
        raise _primaries_error(names, boxes, rows, num_primaries, ranks_of)
    is_written = num_primaries[rows.shard] == 1
    written = replace(rows.select(np.flatnonzero(is_written)), shard=np.cumsum(is_new[is_written]) - 1)
    shards = written.select(np.flatnonzero(written.is_primary))
    if fake.replicas is None:  # what the other ranks hold alone is unknown there
        try:
            violation = check_coverage([spec.shape for spec in specs.values()], boxes, shards)
        except CoverageLimitError as error:
            what = f"{names[error.tensor]!r} {error}"
            raise CheckpointError(f"{what}, so nothing was written: use fewer shards") from None
        if violation is not None:
            raise _violation_error(violation, specs, boxes, rows, ranks_of)
    if len(of_rank) == 1:
        shards = replace(shards, owner=np.zeros(len(shards.tensor), dtype=np.int64))
        return DedupedShards(specs=specs, boxes=boxes, shards=shards, replicas=None)
    first_ranks = np.array([ranks[0] if len(ranks) else -1 for ranks in ranks_of], dtype=np.int64)
    shards = replace(shards, owner=first_ranks[shards.table])
    shards, replicas = _find_replicas(shards, written, of_rank, ranks_of)
    return DedupedShards(specs=specs, boxes=boxes, shards=shards, replicas=replicas)


def _merge(
    tables: Sequence[SliceTable], table_of_rank: np.ndarray, ranks_of: list[np.ndarray]
) -> tuple[dict[str, TensorSpec], list[Box], PlanTable]:
    """Return the specs of all tensors, which must agree, the distinct boxes, and all slices in rank order."""
    names: dict[str, int] = {}
    specs: dict[TensorSpec, int] = {}
    boxes: dict[Box, int] = {}
    renumbered: list[PlanTable] = []
    for number in dict.fromkeys(table_of_rank.tolist()):
        table, rows = tables[number], tables[number].rows
        spec_numbers = np.array([specs.setdefault(spec, len(specs)) for spec in table.specs], dtype=np.int64)
        box_numbers = np.array([boxes.setdefault(box, len(boxes)) for box in table.boxes], dtype=np.int64)
        rows = replace(
            rows,
            tensor=np.array([names.setdefault(name, len(names)) for name in table.names], dtype=np.int64),
            spec=spec_numbers[rows.spec],
            box=box_numbers[rows.box],
            table=np.full(len(table.names), number, dtype=np.int64),
            slice_index=rows.tensor,
        )
        renumbered.append(rows)
    merged = PlanTable(
        **{one.name: np.concatenate([getattr(rows, one.name) for rows in renumbered]) for one in fields(PlanTable)}
    )
    first = np.unique(merged.tensor, return_index=True)[1]
    differing = np.flatnonzero(merged.spec != merged.spec[first][merged.tensor])
    if len(differing):
        pair = merged.select(np.array([first[merged.tensor[differing[0]]], differing[0]]))
        raise _spec_error(list(names)[pair.tensor[0]], list(specs), pair, ranks_of)
    distinct = list(specs)
    spec_of = dict(zip(names, (distinct[number] for number in merged.spec[first].tolist()), strict=True))
    total_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in spec_of.values())
    if total_bytes > _MAX_BYTES:
        raise CheckpointError(f"the tensors have {total_bytes} bytes, above the limit of 2**62: check their shapes")
    return spec_of, list(boxes), merged


def _find_replicas(
    shards: PlanTable, written: PlanTable, table_of_rank: np.ndarray, ranks_of: list[np.ndarray]
) -> tuple[PlanTable, Replicas]:
    """Return the shards with their set of replicas, and the replicas; `written` has all rows, by shard and table."""
    # If the primary's copy is not marked shared, it has no replicas.
    is_replica = written.is_primary | (written.is_shared & shards.is_shared[written.shard])
    is_replica[is_replica] = changes(written.shard[is_replica], written.table[is_replica])
    held = written.select(np.flatnonzero(is_replica))
    set_of_shard, sets = _replica_sets(held.shard, held.table, len(shards.tensor))
    replicas = Replicas(
        sets=[np.sort(np.concatenate([ranks_of[number] for number in numbers])) for numbers in sets],
        table_of_rank=table_of_rank,
        keys=held.shard * (int(table_of_rank.max()) + 1) + held.table,
        slice_indices=held.slice_index,
    )
    return replace(shards, replicas=set_of_shard), replicas


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


def _spec_error(name: str, specs: list[TensorSpec], pair: PlanTable, ranks_of: list[np.ndarray]) -> CheckpointError:
    ranks = [int(ranks_of[table][0]) for table in pair.table]
    first, other = (_format_spec(specs[number]) for number in pair.spec)
    return CheckpointError(
        f"{name!r} is {first} on rank {ranks[0]} and {other} on rank {ranks[1]}, so nothing was written: build the same"
        " model on all ranks"
    )


def _primaries_error(
    names: list[str], boxes: list[Box], rows: PlanTable, num_primaries: np.ndarray, ranks_of: list[np.ndarray]
) -> CheckpointError:
    same = rows.select(np.flatnonzero((rows.shard == np.argmax(num_primaries > 1)) & rows.is_primary))
    box, span = boxes[same.box[0]], (int(same.start[0]), int(same.stop[0]))
    return CheckpointError(
        f"elements {span[0]} to {span[1]} of box {box} of {names[same.tensor[0]]!r} are marked primary"
        f" {int(num_primaries.max())} times, by {_format_ranks(same, ranks_of)}, so nothing was written: mark each"
        " shard primary on exactly one rank, by `is_primary` of the model's or optimizer's wrapper"
    )


def _violation_error(
    violation: CoverageViolation,
    specs: dict[str, TensorSpec],
    boxes: list[Box],
    rows: PlanTable,
    ranks_of: list[np.ndarray],
) -> CheckpointError:
    of_tensor = rows.select(np.flatnonzero(rows.tensor == violation.tensor))
    spans = zip(of_tensor.box.tolist(), of_tensor.start.tolist(), of_tensor.stop.tolist(), strict=True)
    covers = np.array([contains(boxes[box], (start, stop), violation.index) for box, start, stop in spans], dtype=bool)
    name, spec = list(specs.items())[violation.tensor]
    element = f"element {violation.index} of {name!r}, which is {_format_spec(spec)},"
    if violation.num_covers > 1:
        ranks = _format_ranks(of_tensor.select(np.flatnonzero(covers & of_tensor.is_primary)), ranks_of)
        return CheckpointError(
            f"{element} is in more than one primary slice, on {ranks}, so nothing was written: primary slices of a"
            " tensor must not overlap"
        )
    ranks = _format_ranks(of_tensor.select(np.flatnonzero(covers)), ranks_of)
    return CheckpointError(
        f"{element} is in no primary slice (other copies: {ranks}), so nothing was written: mark each shard primary"
        " on exactly one rank"
    )


def _format_spec(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} of shape {spec.shape}"


def _format_ranks(rows: PlanTable, ranks_of: list[np.ndarray]) -> str:
    ranks = sorted({int(rank) for table in rows.table.tolist() for rank in ranks_of[table]})
    return format_ranks(ranks, limit=8) if ranks else "no rank"
