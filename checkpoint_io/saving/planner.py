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
from booster.checkpoint_io.ranks import Ranks
from booster.checkpoint_io.saving.component import Component, Images, PlannedComponent, check_storable
from booster.checkpoint_io.saving.save_request import SaveRequest
from booster.checkpoint_io.storage import Storage
from booster.comm import agree
from booster.errors import CheckpointError

__all__ = ["Agenda", "Planner"]

# Every rank sends a fingerprint: request, digest of its slice table, and host. If all fingerprints equal those of an
# earlier save, its plan is reused and the slice tables are not exchanged. All ranks see the same fingerprints and have
# made the same saves, so the cache hits on all ranks or on none.

_MAX_KEPT = 2  # a model and an optimizer, saved alternately
_NAME_BYTES, _DIGEST_BYTES, _HOST_BYTES = 16, 32, 8

Plans = list[tuple[SavePlan, Images]]
Key = tuple[tuple[str, ...], tuple[bytes, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agenda:
    """Agreed save: plan and identity.

    Attributes:
        name: Unique name of the save, equal on all ranks.
        components: Planned parts of the checkpoint.
        host_of_rank: Host index of each rank; equal for ranks on the same machine.
    """

    name: str
    components: Sequence[PlannedComponent]
    host_of_rank: Sequence[int]


class Planner:
    """Plans the saves of one process group.

    Args:
        ranks: Ranks that save together.
        storage: Storage to write to.
    """

    def __init__(self, ranks: Ranks, storage: Storage) -> None:
        self._ranks = ranks
        self._storage = storage
        self._kept: OrderedDict[Key, Plans] = OrderedDict()

    def plan(self, request: SaveRequest) -> Agenda:
        """Plan a save on all ranks. Collective.

        Raises:
            CheckpointError: Tensors that cannot be written, incomplete tensors, or too little free space.
            DesyncError: The ranks requested different saves.
        """
        ranks, components = self._ranks, request.components
        tables = ranks.agree(lambda: [_table(component) for component in components], request.doing)
        names, digests, hosts = self._show_cards(request, tables)
        key = (_options(request), digests, hosts)
        plans = self._kept.get(key)
        if plans is None:
            plans = [
                (self._new_plan(one, table, hosts, request.doing), Images())
                for one, table in zip(components, tables, strict=True)
            ]

        def complete() -> list[PlannedComponent]:
            planned = [
                PlannedComponent(component, plan, request.target.name, images if component.values is None else Images())
                for component, (plan, images) in zip(components, plans, strict=True)
            ]
            # Building the images raises for names and dtypes that the file format does not support.
            self._check_space(sum(one.num_bytes for one in planned), request)
            return planned

        planned = ranks.agree(complete, request.doing)
        self._keep(key, plans)
        return Agenda(name=names[0].hex(), components=planned, host_of_rank=hosts)

    def _show_cards(
        self, request: SaveRequest, tables: Sequence[bytes]
    ) -> tuple[list[bytes], tuple[bytes, ...], tuple[int, ...]]:
        facts = [
            f"{request.doing} to {request.target}",
            f"is_directory={request.is_directory}",
            f"format {FORMAT_VERSION}",
            *_options(request),
        ]
        held = _digest(*(_digest(table) for table in tables))
        host = _digest(self._ranks.host.encode())[:_HOST_BYTES]
        cards = self._ranks.gather_equal(uuid4().bytes + _digest("\n".join(facts).encode()) + held + host)
        names, rest = [card[:_NAME_BYTES] for card in cards], [card[_NAME_BYTES:] for card in cards]
        if len({card[:_DIGEST_BYTES] for card in rest}) > 1:
            agree("what they save", facts, self._ranks.group)
        hosts = [card[2 * _DIGEST_BYTES :] for card in rest]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        digests = tuple(card[_DIGEST_BYTES : 2 * _DIGEST_BYTES] for card in rest)
        return names, digests, tuple(numbers[host] for host in hosts)

    def _new_plan(self, component: Component, table: bytes, hosts: Sequence[int], doing: str) -> SavePlan:
        tables, table_of_rank = self._ranks.gather(table)
        return self._ranks.agree(
            lambda: plan_save(
                [SliceTable.decode(raw) for raw in tables],
                table_of_rank,
                component.names,
                max_shard_bytes=component.max_shard_bytes,
                is_sharded=component.is_sharded,
                always_index=component.always_index,
                host_of_rank=hosts,
            ),
            doing,
        )

    def _keep(self, key: Key, plans: Plans) -> None:
        self._kept[key] = plans
        self._kept.move_to_end(key)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)

    def _check_space(self, needed: int, request: SaveRequest) -> None:
        if self._ranks.rank != 0:
            return
        free = self._storage.free_bytes(request.target)
        if free < needed:  # leftovers of a killed save may take as much as this save needs
            request.transaction(self._storage).clear_leftovers()
            free = self._storage.free_bytes(request.target)
        if free < needed:
            raise CheckpointError(
                f"{request.doing} to {request.target} needs {needed} bytes, but only {free} are free: free some space,"
                " or save elsewhere"
            )


def _table(component: Component) -> bytes:
    check_storable(component.slices)
    return SliceTable.of(component.slices).encode()


def _options(request: SaveRequest) -> tuple[str, ...]:
    return tuple(
        f"{one.kind.name} {one.folder}/{one.names} of at most {one.max_shard_bytes} bytes a file, sharded:"
        f" {one.is_sharded}, index: {one.always_index}"
        for one in request.components
    )


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
