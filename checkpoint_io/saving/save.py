"""Save on all ranks: plan, create, write, verify, commit."""

from __future__ import annotations

import os
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from booster.checkpoint_io.commit import Transaction, paths_in
from booster.checkpoint_io.formats.manifest import FORMAT_VERSION, DocumentRecord, Manifest
from booster.checkpoint_io.layout import ADAPTER, MODEL, TRAINING_STATE_MANIFEST, SaveTarget
from booster.checkpoint_io.parallel import CheckpointGroup, as_checkpoint_error, run_in_threads
from booster.checkpoint_io.planning.save_plan import SavePlan, WriteRange, plan_save
from booster.checkpoint_io.planning.slices import SliceTable
from booster.checkpoint_io.storage import Storage
from booster.comm import (
    ErrorBarrier,
    all_gather_bytes,
    all_gather_equal,
    check_same_across_ranks,
    fake,
    new_cpu_group,
    raise_on_all_ranks,
)
from booster.errors import BoosterError, CheckpointError
from booster.fault_tolerance.progress import Phase
from booster.interface import TensorSlice
from booster.logger import get_dist_logger

from .async_save import Arena, AsyncSaves, stage_slices
from .part import CheckpointPart, Images, PlannedPart
from .writer import PartWrites, Relay, Slices, write_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Content and target of one save.

    Attributes:
        parts: Parts of the checkpoint, at least one, with one path.
        documents: Further small files, written by rank 0, by name.
        manifest_name: Name of a manifest over the documents and the parts' manifests. Optional, defaults to no
            such manifest.
        metadata: JSON metadata of the save for the manifest.
        is_stale: Predicate: a file of this name, relative to the target, is a leftover of the replaced save.
        is_related: Predicate: a save to this sibling name belongs to the same run; see `Transaction`.
        after_commit: Called on rank 0 after the commit.
    """

    parts: Sequence[CheckpointPart]
    documents: Mapping[str, bytes] = field(default_factory=dict)
    manifest_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_stale: Callable[[str], bool] | None = None
    is_related: Callable[[str], bool] | None = None
    after_commit: Callable[[], None] | None = None

    @property
    def target(self) -> SaveTarget:
        """Final directory or file."""
        return self.parts[0].target


# Note [Agreement]
# Every rank proposes the plan of its last save with these options and this slice table, and checks that it can be
# written. Then one exchange decides: each rank sends a fingerprint, that is the request, the digest of its slice table,
# its host, and the number of the proposed plan or that it failed. All ranks see the same fingerprints and have made the
# same saves, so they decide alike: if the fingerprints are those of the save before, its plan holds, and an
# asynchronous save has nothing more to agree on before its tensors may change. Otherwise the slice tables are
# exchanged. That a rank could not copy its tensors is raised, as all failures of the background, by the next call.

_MAX_CACHED_PLANS = 2  # a model and an optimizer, saved alternately
_FINGERPRINT = struct.Struct("16s 32s 32s 8s B")  # name of the save, digests of request, tables and host, proposal
_NO_PLAN, _FAILED = 254, 255  # instead of the number of a proposed plan
_NUM_THREADS = 4

Plans = list[tuple[SavePlan, Images]]
Key = tuple[tuple[str, ...], tuple[bytes, ...], tuple[int, ...]]


@dataclass(slots=True, kw_only=True)
class _Proposal:
    """What this rank knows of a save before the exchange; see Note [Agreement].

    Attributes:
        request: Content and target.
        options: Description of the targets, equal on all ranks that make the same save.
        tables: Slice table of every part.
        encoded: The same as bytes.
        digest: Digest of these.
        planned: Parts by the proposed plan, or None.
        plan: Number of the proposed plan in the cache, or `_NO_PLAN`.
    """

    request: SaveRequest
    options: tuple[str, ...]
    tables: list[SliceTable]
    encoded: list[bytes]
    digest: bytes
    planned: list[PlannedPart] | None = None
    plan: int = _NO_PLAN


def _fake_tables(
    slices: Sequence[TensorSlice], table: bytes, ranks: CheckpointGroup, replicas: fake.FakeReplicas
) -> tuple[list[bytes], list[int]]:
    """Return the slice tables of a fake world, of this rank's slices only: what others hold alone changes none of them.

    Returns:
        The different tables, and for every rank the index of its table.
    """
    numbers, table_of_rank = {table: 0}, []
    table_of_axes: dict[tuple[str, ...], int] = {(): 0}
    for other in range(ranks.size):
        axes = replicas.axes_between(other)
        if axes not in table_of_axes:
            held = [
                replace(one, primary=False)
                for one in slices
                if one.shared and replicas.is_replicated((one.name, one.box, one.span), axes)
            ]
            encoded = SliceTable.from_slices(held).encode()
            table_of_axes[axes] = numbers.setdefault(encoded, len(numbers))
        table_of_rank.append(table_of_axes[axes])
    return list(numbers), table_of_rank


@contextmanager
def explain_missing_parents(storage: Storage, target: Path, action: str) -> Iterator[None]:
    """Replace an error by one that names the missing parent directory, if that is the cause.

    Args:
        storage: Storage of the target.
        target: File or directory to write; the block creates its parents.
        action: Description of the operation with the target, for messages.

    Raises:
        CheckpointError: The parents could not be created.
        OSError: Any other error of the block.
    """
    try:
        yield
    except OSError as error:
        parent = Path(os.path.realpath(target.parent))
        existing = parent
        while storage.kind(existing) is None:
            existing = existing.parent
        if existing == parent and storage.kind(existing) == "directory":
            raise
        is_directory = storage.kind(existing) == "directory"
        reason = f"the directory {parent} cannot be created" if is_directory else f"{existing} is not a directory"
        raise CheckpointError(
            f"{action} failed, because {reason} ({error}): give a path below a writable directory"
        ) from error


class Saver:
    """Saves of one process group.

    Args:
        ranks: Ranks that save together.
        storage: Storage to write to.
        timeout_seconds: Timeout for the other ranks in each phase. Optional, defaults to that of the launch.
    """

    def __init__(self, ranks: CheckpointGroup, storage: Storage, timeout_seconds: float | None = None) -> None:
        self._ranks = ranks
        self._storage = storage
        self._timeout_seconds = timeout_seconds
        self._plan_cache: OrderedDict[Key, Plans] = OrderedDict()
        self._async: AsyncSaves | None = None  # made by the first save in the background
        self._relay: Relay | None = None

    def save(self, prepare: Callable[[], SaveRequest], action: str, *, use_async: bool = False) -> None:
        """Save; return when the checkpoint is on disk or, with `use_async`, when tensors may be modified.

        Saves take effect in call order: a synchronous save waits for the asynchronous ones before it.

        Args:
            prepare: Function that returns the content and target. It must not call collectives, except as its first
                step and if any failure of that step occurs on all ranks.
            action: Description of the operation for messages.
            use_async: If True, write in the background.

        Collective: every rank must call it with the same arguments and its own slices.

        Raises:
            CheckpointError: Tensors cannot be written or are incomplete, too little space is free, or writing failed on
                some rank; the target is unchanged.
            DesyncError: The ranks requested different saves.
        """
        if self._async is not None and not use_async:
            self._async.wait()  # otherwise an earlier async save would later overwrite this one
        with Phase("save plan"):
            name, request, planned, host_of_rank = self._plan(prepare, action)
        barrier: ErrorBarrier | None = None
        if self._ranks.size > 1 and fake.replicas is None:
            barrier = ErrorBarrier(self._ranks.group, name=f"checkpoint/{name}", timeout_seconds=self._timeout_seconds)
        relay: Relay | None = None
        if len(set(host_of_rank)) > 1:
            self._relay = self._relay or Relay(new_cpu_group(self._ranks.group), self._ranks.rank)
            relay = self._relay
        description = f"{action} to {request.target.path}"
        if not use_async:
            slices = [planned_part.part.slices for planned_part in planned]
            _SaveJob(self._ranks, self._storage, description, request, planned, slices, barrier, relay).run()
            return

        def stage(arena: Arena) -> Callable[[], None]:
            rank, failure, copies = self._ranks.rank, None, list[Slices]()
            try:
                for one in planned:
                    copies.append(stage_slices(list(one.plan.ranges(owner=rank)), one.part.slices, arena))
            except Exception as error:  # raised by the job, on every rank
                failure = as_checkpoint_error(error, description)
            return _SaveJob(
                self._ranks, self._storage, description, request, planned, copies, barrier, relay, failure
            ).run_in_background

        self._async = self._async or AsyncSaves(self._ranks)
        self._async.start(stage, action)

    def wait(self) -> None:
        """Wait until no save is in flight. Collective.

        Raises:
            CheckpointError: A save failed on some rank.
        """
        if self._async is not None:
            self._async.wait()

    def _plan(
        self, prepare: Callable[[], SaveRequest], action: str
    ) -> tuple[str, SaveRequest, list[PlannedPart], Sequence[int]]:
        """Plan a save on all ranks; see Note [Agreement]. Collective.

        Returns:
            Unique name of the save, equal on all ranks, its content, its planned parts, and the host index of each
            rank.
        """
        ranks, failure, proposals = self._ranks, None, list[_Proposal]()
        try:
            proposals.append(self._propose(prepare, action))
        except Exception as error:  # raised on every rank after the exchange
            failure = as_checkpoint_error(error, action)
        own = proposals[0] if proposals else None
        name, digests, hosts, numbers = self._exchange_fingerprints(own, action)
        if _FAILED in numbers:
            if self._async is not None:
                self._async.raise_failures()
            raise_on_all_ranks(failure, ranks.group)
        assert own is not None, "a rank without a proposal fails"
        key = (own.options, digests, hosts)
        plans = self._plan_cache.get(key)
        is_agreed = plans is not None and set(numbers) == {list(self._plan_cache).index(key)}
        if plans is None:
            plans = [
                (self._new_plan(one, table, raw, hosts, action), Images())
                for one, table, raw in zip(own.request.parts, own.tables, own.encoded, strict=True)
            ]
        planned = own.planned
        if planned is None or not is_agreed:
            of_all = plans
            planned = ranks.run_on_all_ranks(lambda: self._complete(own.request, of_all, action), action)
        self._plan_cache[key] = plans
        self._plan_cache.move_to_end(key)
        while len(self._plan_cache) > _MAX_CACHED_PLANS:
            self._plan_cache.popitem(last=False)
        return name, own.request, planned, hosts

    def _propose(self, prepare: Callable[[], SaveRequest], action: str) -> _Proposal:
        request = prepare()
        options = tuple(
            f"{to.kind.name} {part.folder}/{to.names} of at most {to.max_shard_bytes} bytes a file, directory:"
            f" {to.is_directory}, index: {part.always_index}"
            for part in request.parts
            for to in (part.target,)
        )
        tables = [SliceTable.from_slices(part.slices) for part in request.parts]
        encoded = [table.encode() for table in tables]
        digest = sha256(b"".join(sha256(raw).digest() for raw in encoded)).digest()
        proposal = _Proposal(request=request, options=options, tables=tables, encoded=encoded, digest=digest)
        known = [
            number
            for number, (known_options, digests, _) in enumerate(self._plan_cache)
            if known_options == options and digests[self._ranks.rank] == digest
        ]
        if known:
            with suppress(BoosterError, OSError):  # raised where all ranks check the plan that they agree on
                plans = list(self._plan_cache.values())[known[-1]]
                proposal.planned, proposal.plan = self._complete(request, plans, action), known[-1]
        return proposal

    def _exchange_fingerprints(
        self, own: _Proposal | None, action: str
    ) -> tuple[str, tuple[bytes, ...], tuple[int, ...], tuple[int, ...]]:
        """Exchange the fingerprints; None: this rank failed. Collective.

        Returns:
            The save's name, and by rank the tables' digest, the host index and the proposal.
        """
        ranks, has_failed = self._ranks, own is None or (self._async is not None and self._async.has_failed())
        number = _FAILED if has_failed or own is None else own.plan
        digest = b"" if own is None else own.digest
        if ranks.size == 1 or fake.replicas is not None:
            return "", (digest,) * ranks.size, (0,) * ranks.size, (number,) * ranks.size
        description: list[str] = []
        if own is not None:
            target = own.request.target
            description = [
                f"{action} to {target.path}",
                f"is_directory={target.is_directory}",
                f"format {FORMAT_VERSION}",
                *own.options,
            ]
        request_digest = sha256("\n".join(description).encode()).digest()
        host_digest = sha256(ranks.host.encode()).digest()
        fingerprint = _FINGERPRINT.pack(uuid4().bytes, request_digest, digest, host_digest, number)
        local = torch.frombuffer(bytearray(fingerprint), dtype=torch.uint8)
        gathered = all_gather_equal(local, ranks.group).numpy().tobytes()
        names, requests, digests, hosts, numbers = zip(*_FINGERPRINT.iter_unpack(gathered), strict=True)
        if len(set(requests)) > 1 and _FAILED not in numbers:
            check_same_across_ranks("what they save", description, ranks.group)
        indexes = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
        return names[0].hex(), digests, tuple(indexes[host] for host in hosts), numbers

    def _new_plan(
        self, part: CheckpointPart, table: SliceTable, encoded: bytes, hosts: Sequence[int], action: str
    ) -> SavePlan:
        gathered, table_of_rank = [encoded], [0]
        if fake.replicas is not None:
            gathered, table_of_rank = _fake_tables(part.slices, encoded, self._ranks, fake.replicas)
        elif self._ranks.size > 1:
            gathered, table_of_rank = all_gather_bytes(encoded, self._ranks.group)
        return self._ranks.run_on_all_ranks(
            lambda: plan_save(
                [table if raw == encoded else SliceTable.decode(raw) for raw in gathered],
                table_of_rank,
                part.target.names,
                max_shard_bytes=part.target.max_shard_bytes,
                is_sharded=part.target.is_directory,
                always_index=part.always_index,
                host_of_rank=hosts,
            ),
            action,
        )

    def _complete(self, request: SaveRequest, plans: Plans, action: str) -> list[PlannedPart]:
        """Return the parts with their plans, after a check that the files can be written and the space is free."""
        planned = [
            PlannedPart(
                part=part,
                plan=plan,
                paths=[
                    os.path.join(part.folder, file.name if part.target.is_directory else part.target.path.name)
                    for file in plan.files
                ],
                images=images if part.values is None else Images(),
            )
            for part, (plan, images) in zip(request.parts, plans, strict=True)
        ]
        # Building the images raises for names and dtypes that the file format does not support.
        needed = sum(one.image(index).num_bytes for one in planned for index in range(len(one.plan.files)))
        if self._ranks.rank != 0:
            return planned
        target = request.target
        folder = target.path if target.is_directory else target.path.parent
        replaced = folder / target.names.manifest if target.is_directory else target.path
        # Adapters beside a training state are no part of it.
        is_of_state = request.manifest_name is None and target.kind is not ADAPTER
        replaces = is_of_state and self._storage.kind(replaced) is not None
        if replaces and self._storage.kind(folder / TRAINING_STATE_MANIFEST) is not None:
            raise CheckpointError(
                f"{action} to {target.path} would replace a part of the training state in {folder}, which could"
                " not be loaded any more: give another path, or a directory with prefix=, or save the whole state by"
                " booster.save()"
            )
        free = self._storage.free_bytes(target.path)
        if free < needed:  # removed files and leftovers of a killed save may take as much as this save needs
            self._storage.wait_for_freed_space()
            leftovers = Transaction(
                self._storage, target.path, is_directory=target.is_directory, is_related=request.is_related
            )
            leftovers.clear_leftovers()
            free = self._storage.free_bytes(target.path)
        if free < needed:
            raise CheckpointError(
                f"{action} to {target.path} needs {needed} bytes, but only {free} are free: free some space,"
                " or save elsewhere"
            )
        return planned


@dataclass(slots=True, eq=False)
class _SaveJob:
    """Phases of a save after planning. They call no collectives, so they can run in the background.

    Without a barrier there is only one rank: a phase that fails just raises.
    """

    _ranks: CheckpointGroup
    _storage: Storage
    _action: str  # with the target, for messages
    _request: SaveRequest
    _planned: Sequence[PlannedPart]
    _slices: Sequence[Slices]
    _barrier: ErrorBarrier | None
    _relay: Relay | None
    _failure: Exception | None = None  # of this rank, before the first phase
    _transaction: Transaction | None = field(default=None, init=False)

    def run(self) -> None:
        """Write and commit."""
        if fake.replicas is not None:  # files are created and committed by small writes
            if self._failure is not None:
                raise self._failure
            self._write(self._request.target.path)
            return
        try:
            with Phase("save write"):
                directory = Path(self._run_phase("creating the files", self._create, on_rank_zero=True)[0].decode())
                reports = self._run_phase("writing", lambda: self._write(directory))
            with Phase("commit"):
                self._run_phase("committing", lambda: self._commit(directory, reports), on_rank_zero=True)
        finally:
            if self._transaction is not None:
                self._transaction.abort()  # no effect after a commit

    def run_in_background(self) -> None:
        """Write and commit. The last gather keeps rank 0, which may host the store, alive until all ranks are done."""
        with Phase("save"):
            self.run()
            if self._barrier is not None:
                self._barrier.gather("leaving")

    def _run_phase(self, phase: str, action: Callable[[], bytes], *, on_rank_zero: bool = False) -> list[bytes]:
        """Run an action on all ranks, or on rank 0 alone; a failure is raised on every rank.

        Returns:
            The results by rank, on rank 0; or rank 0's result alone, on every rank.
        """
        payload, failure = b"", self._failure
        try:
            if failure is None and (self._ranks.rank == 0 or not on_rank_zero):
                payload = action()
        except Exception as error:  # raised by the barrier, on every rank
            failure = as_checkpoint_error(error, self._action)
        if self._barrier is None:
            if failure is not None:
                raise failure
            return [payload]
        if on_rank_zero:
            return [self._barrier.share(phase, payload, failure)]
        return self._barrier.gather(phase, payload, failure)

    # Rank 0, before the write.

    def _create(self) -> bytes:
        request, target = self._request, self._request.target
        self._transaction = Transaction(
            self._storage, target.path, is_directory=target.is_directory, is_related=request.is_related
        )
        with explain_missing_parents(self._storage, target.path, self._action):
            directory = self._transaction.begin()
        for folder in sorted({planned_part.part.folder for planned_part in self._planned} - {""}):
            self._storage.make_directory(directory / folder)
        for planned_part in self._planned:
            for index in range(len(planned_part.plan.files)):
                image = planned_part.image(index)
                file = self._storage.create(directory / planned_part.paths[index])
                try:
                    self._storage.resize(file, image.num_bytes)
                    for offset, content in image.fragments:
                        self._storage.write_at(file, content, offset)
                    # A rank of this host that writes data syncs the fragments with it.
                    if self._relay is not None or planned_part.plan.files[index].data_bytes == 0:
                        self._storage.sync(file)
                finally:
                    self._storage.close(file)
        return str(directory).encode()

    # Every rank.

    def _write(self, directory: Path) -> bytes:
        """Write this rank's ranges; return their checksums in plan order."""
        crcs, rank = array("I"), self._ranks.rank
        parts = [
            PartWrites(
                files=[
                    (directory / planned_part.paths[index], planned_part.image(index))
                    for index in range(len(planned_part.plan.files))
                ],
                ranges=list(planned_part.plan.ranges(owner=rank, writer=rank)),
                slices=slices,
            )
            for planned_part, slices in zip(self._planned, self._slices, strict=True)
        ]
        failure: Exception | None = None
        written: Sequence[Sequence[int]] = [[0] * len(part.ranges) for part in parts]
        try:
            written = write_ranges(self._storage, parts)
        except Exception as error:
            if self._relay is None:
                raise
            failure = error  # raised below: ranks of other hosts wait for what this one sends
        for planned_part, part, part_crcs in zip(self._planned, parts, written, strict=True):
            if self._relay is None:  # this rank holds all that it writes
                crcs.extend(part_crcs)
                continue
            checksums = dict(zip(part.ranges, part_crcs, strict=True))
            received, relay_failure = self._relay.exchange(self._storage, planned_part.plan, part.files, part.slices)
            failure = failure or relay_failure
            checksums |= received
            crcs.extend(checksums[write_range] for write_range in planned_part.plan.ranges(writer=rank))
        if failure is not None:
            raise failure
        return crcs.tobytes()

    # Rank 0, after the write.

    def _commit(self, directory: Path, reports: Sequence[bytes]) -> bytes:
        assert self._transaction is not None
        crcs = self._collect_checksums(reports)
        documents = dict(self._request.documents)
        metadata = dict(self._request.metadata)
        small_files = dict[Path, bytes]()
        for planned_part, part_crcs in zip(self._planned, crcs, strict=True):
            folder = directory / planned_part.part.folder
            final_names = self._final_names(planned_part) if self._transaction.is_inside else {}
            for name, final_name in final_names.items():
                self._storage.rename_new(folder / name, folder / final_name)
            head, of_part = planned_part.complete(part_crcs, metadata, final_names)
            if head is not None:
                with self._storage.open_for_writing(directory / planned_part.paths[0]) as file:
                    self._storage.write_at(file, head, 0)
                    self._storage.sync(file)
            for name, content in of_part.items():
                small_files[folder / name] = content
                if name == planned_part.part.target.names.manifest:
                    documents[f"{planned_part.part.folder}/{name}".lstrip("/")] = content
        if self._request.manifest_name is not None:
            small_files |= {directory / name: raw for name, raw in self._request.documents.items()}
            records = {name: DocumentRecord.of(raw) for name, raw in sorted(documents.items())}
            manifest = Manifest(kind="training_state", files={}, documents=records, metadata=metadata)
            small_files[directory / self._request.manifest_name] = manifest.encode()
        # Concurrent fsyncs share commits of the file system's journal: on ext4, 7 files alone took 2 ms instead of 15.
        run_in_threads(
            lambda file: self._storage.write_file(*file), small_files.items(), min(_NUM_THREADS, len(small_files))
        )
        self._transaction.commit(is_stale=self._is_stale)
        if self._request.after_commit is not None:
            self._request.after_commit()
        return b""

    def _final_names(self, planned_part: PlannedPart) -> dict[str, str]:
        """Return other names for shards whose names are taken in the target; see Note [Second names]."""
        names, folder = planned_part.part.target.names, self._request.target.path / planned_part.part.folder
        if planned_part.plan.layout.index is None:
            return {}
        taken = paths_in(self._storage, folder) if self._storage.kind(folder) == "directory" else {}
        second = {file.name: names.second_shard(file.name) for file in planned_part.plan.files}
        return second if not taken.keys().isdisjoint(second) and taken.keys().isdisjoint(second.values()) else {}

    def _collect_checksums(self, reports: Sequence[bytes]) -> list[dict[WriteRange, int]]:
        """Return the checksum of every planned range, by checkpoint part; an incomplete report is an error."""
        checksums: list[dict[WriteRange, int]] = [{} for _ in self._planned]
        for rank, raw in enumerate(reports):
            crcs = array("I")
            crcs.frombytes(raw)
            position = 0
            for planned_part, part_crcs in zip(self._planned, checksums, strict=True):
                ranges = list(planned_part.plan.ranges(writer=rank))
                part_crcs.update(zip(ranges, crcs[position : position + len(ranges)], strict=False))
                position += len(ranges)
            if position != len(crcs):
                raise CheckpointError(
                    f"{self._action}: rank {rank} wrote {len(crcs)} ranges, but"
                    f" {position} were planned: the ranks run different versions of torch-booster, install the same one"
                    " on all"
                )
        return checksums

    def _is_stale(self, name: str) -> bool:
        folder, _, base = name.rpartition("/")
        for target in (one.part.target for one in self._planned if one.part.folder == folder):
            if target.names.may_have_written(base):
                return True
            other = target.other_names
            if not other.may_have_written(base):
                continue
            if self._storage.kind(target.path / folder / other.manifest) is not None:
                return True  # an older save in the other format, which readers would find beside this one
            if target.kind == MODEL and base in (other.single, other.index) and other.suffix == "safetensors":
                get_dist_logger().warning(
                    f"{target.path / name} stays, and transformers reads it before the model that is saved"
                    " beside it in torch's format: remove it, or save safetensors"
                )
        return self._request.is_stale is not None and self._request.is_stale(name)
