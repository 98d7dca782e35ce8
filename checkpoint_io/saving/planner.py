"""Save planning across ranks, with plans cached as long as the fingerprints of all ranks stay the same."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from booster.checkpoint_io.files.manifest import FORMAT_VERSION
from booster.checkpoint_io.planning.plan import SavePlan, plan_save
from booster.checkpoint_io.planning.slice_table import SliceTable
from booster.checkpoint_io.ranks import CheckpointGroup
from booster.checkpoint_io.saving.component import CheckpointPart, Images, PlannedPart, check_storable
from booster.checkpoint_io.saving.save_request import SaveRequest
from booster.checkpoint_io.storage import Storage
from booster.comm import check_same_across_ranks
from booster.errors import CheckpointError

__all__ = ["Planner", "SaveSession"]

# Every rank sends a fingerprint: request, digest of its slice table, and host. If all fingerprints equal those of an
# earlier save, its plan is reused and the slice tables are not exchanged. All ranks see the same fingerprints and have
# made the same saves, so the cache hits on all ranks or on none.

_MAX_CACHED_PLANS = 2  # a model and an optimizer, saved alternately
_NAME_BYTES, _DIGEST_BYTES, _HOST_BYTES = 16, 32, 8

Plans = list[tuple[SavePlan, Images]]
Key = tuple[tuple[str, ...], tuple[bytes, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSession:
    """Agreed save: plan and identity.

    Attributes:
        name: Unique name of the save, equal on all ranks.
        components: Planned parts of the checkpoint.
        host_of_rank: Host index of each rank; equal for ranks on the same machine.
    """

    name: str
    parts: Sequence[PlannedPart]
    host_of_rank: Sequence[int]


class Planner:
    """Plans the saves of one process group.

    Args:
        ranks: Ranks that save together.
        storage: Storage to write to.
    """

    def __init__(self, ranks: CheckpointGroup, storage: Storage) -> None:
        self._ranks = ranks
        self._storage = storage
        self._plan_cache: OrderedDict[Key, Plans] = OrderedDict()

    def plan(self, request: SaveRequest) -> SaveSession:
        """Plan a save on all ranks. Collective.

        Raises:
            CheckpointError: Tensors that cannot be written, incomplete tensors, or too little free space.
            DesyncError: The ranks requested different saves.
        """
        ranks, parts = self._ranks, request.parts
        tables = ranks.run_on_all_ranks(lambda: [_table(component) for component in parts], request.action)
        names, digests, hosts = self._exchange_fingerprints(request, tables)
        key = (_options(request), digests, hosts)
        plans = self._plan_cache.get(key)
        if plans is None:
            plans = [
                (self._new_plan(one, table, hosts, request.action), Images())
                for one, table in zip(parts, tables, strict=True)
            ]

        def complete() -> list[PlannedPart]:
            planned = [
                PlannedPart(component, plan, request.target.name, images if component.values is None else Images())
                for component, (plan, images) in zip(parts, plans, strict=True)
            ]
            # Building the images raises for names and dtypes that the file format does not support.
            self._check_space(sum(one.num_bytes for one in planned), request)
            return planned

        planned = ranks.run_on_all_ranks(complete, request.action)
        self._cache_plan(key, plans)
        return SaveSession(name=names[0].hex(), parts=planned, host_of_rank=hosts)

    def _exchange_fingerprints(
        self, request: SaveRequest, tables: Sequence[bytes]
    ) -> tuple[list[bytes], tuple[bytes, ...], tuple[int, ...]]:
        description = [
            f"{request.action} to {request.target}",
            f"is_directory={request.is_directory}",
            f"format {FORMAT_VERSION}",
            *_options(request),
        ]
        tables_digest = _digest(*(_digest(table) for table in tables))
        host = _digest(self._ranks.host.encode())[:_HOST_BYTES]
        fingerprints = self._ranks.all_gather_equal_sized(
            uuid4().bytes + _digest("\n".join(description).encode()) + tables_digest + host
        )
        names, rest = (
            [fingerprint[:_NAME_BYTES] for fingerprint in fingerprints],
            [fingerprint[_NAME_BYTES:] for fingerprint in fingerprints],
        )
        if len({fingerprint[:_DIGEST_BYTES] for fingerprint in rest}) > 1:
            check_same_across_ranks("what they save", description, self._ranks.group)
        hosts = [fingerprint[2 * _DIGEST_BYTES :] for fingerprint in rest]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        digests = tuple(fingerprint[_DIGEST_BYTES : 2 * _DIGEST_BYTES] for fingerprint in rest)
        return names, digests, tuple(numbers[host] for host in hosts)

    def _new_plan(self, part: CheckpointPart, table: bytes, hosts: Sequence[int], action: str) -> SavePlan:
        tables, table_of_rank = self._ranks.all_gather_distinct(table)
        return self._ranks.run_on_all_ranks(
            lambda: plan_save(
                [SliceTable.decode(raw) for raw in tables],
                table_of_rank,
                part.names,
                max_shard_bytes=part.max_shard_bytes,
                is_sharded=part.is_sharded,
                always_index=part.always_index,
                host_of_rank=hosts,
            ),
            action,
        )

    def _cache_plan(self, key: Key, plans: Plans) -> None:
        self._plan_cache[key] = plans
        self._plan_cache.move_to_end(key)
        while len(self._plan_cache) > _MAX_CACHED_PLANS:
            self._plan_cache.popitem(last=False)

    def _check_space(self, needed: int, request: SaveRequest) -> None:
        if self._ranks.rank != 0:
            return
        free = self._storage.free_bytes(request.target)
        if free < needed:  # leftovers of a killed save may take as much as this save needs
            request.transaction(self._storage).clear_leftovers()
            free = self._storage.free_bytes(request.target)
        if free < needed:
            raise CheckpointError(
                f"{request.action} to {request.target} needs {needed} bytes, but only {free} are free: free some space,"
                " or save elsewhere"
            )


def _table(part: CheckpointPart) -> bytes:
    check_storable(part.slices)
    return SliceTable.from_slices(part.slices).encode()


def _options(request: SaveRequest) -> tuple[str, ...]:
    return tuple(
        f"{part.kind.name} {part.folder}/{part.names} of at most {part.max_shard_bytes} bytes a file, sharded:"
        f" {part.is_sharded}, index: {part.always_index}"
        for part in request.parts
    )


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
