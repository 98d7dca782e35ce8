"""Full training checkpoint in one directory: models, optimizers, schedulers, dataloaders, RNG states, user values."""

from __future__ import annotations

import json
import os
import platform
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from booster.checkpoint_io.commit import resolve
from booster.checkpoint_io.formats import json_values
from booster.checkpoint_io.formats.json import MAX_JSON_BYTES
from booster.checkpoint_io.formats.manifest import Manifest
from booster.checkpoint_io.layout import (
    GRADIENTS,
    MODEL,
    OPTIMIZER,
    RANDOM_STATE,
    FileKind,
    SaveTarget,
    as_path,
    save_target,
)
from booster.checkpoint_io.loading.load import Load, Loader, ModelLoad, OptimizerLoad
from booster.checkpoint_io.loading.ranges import read_slices
from booster.checkpoint_io.loading.reader import StoredCheckpoint
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.saving.part import (
    CheckpointPart,
    model_part,
    optimizer_part,
    optimizer_values,
    save_metadata,
)
from booster.checkpoint_io.saving.save import Saver, SaveRequest
from booster.checkpoint_io.storage import Storage
from booster.comm import all_gather_bytes, check_same_across_ranks
from booster.errors import CheckpointError, format_list
from booster.interface import AccumulatedGradients, TensorSlice
from booster.interface.checkpoint_io import RandomState, SaveOptions, TrainingParts
from booster.logger import get_dist_logger

from .accumulated_gradients import AccumulatedGradientsLoad, gradients_part
from .document import PerRank, TrainingDocument, scheduler_document, scheduler_state
from .retention import LATEST, TRAINING_STATE, TRAINING_STATE_MANIFEST, StepDirectories, read_training_manifest


def random_state_part(tensors: Mapping[str, torch.Tensor], rank: int, target: SaveTarget) -> CheckpointPart:
    """Build the checkpoint part of this rank's random state, named `rank<r>.<name>`; each rank writes its own."""
    slices = [TensorSlice.full(f"rank{rank}.{name}", tensor, primary=True) for name, tensor in tensors.items()]
    return CheckpointPart(target=target.with_kind(RANDOM_STATE), slices=slices)


class RandomStateLoad:
    """Load of this rank's random generators.

    Args:
        loader: Loader that opens the files.
        directory: Directory of the training state.
        num_stored: Number of ranks that saved.
        random_state: Random generators of this process.
    """

    def __init__(self, loader: Loader, directory: Path, num_stored: int, random_state: RandomState) -> None:
        self._loader = loader
        self._directory = directory
        self._num_stored = num_stored
        self._random_state = random_state
        self._action = f"loading the random state from {directory}"

    def check(self) -> None:
        """Read the states, which are small. Collective.

        Raises:
            CheckpointError: A state is missing or damaged.
        """
        stored = self._loader.open(self._directory, RANDOM_STATE)
        self._loader.verify(stored)
        self._state = self._loader.ranks.run_on_all_ranks(lambda: self._read(stored), self._action)

    def fill(self) -> None:
        """Restore the generators. Collective."""
        self._loader.ranks.run_on_all_ranks(lambda: self._random_state.restore(self._state), self._action)

    def _read(self, stored: StoredCheckpoint) -> Mapping[str, torch.Tensor]:
        rank = self._loader.ranks.rank
        prefix = f"rank{rank % self._num_stored}."
        state: dict[str, torch.Tensor] = {}
        for name, spec in stored.specs.items():
            if name.startswith(prefix):
                tensor = torch.empty(spec.shape, dtype=spec.dtype)
                read_slices(stored, [(name, TensorSlice.full(name, tensor, primary=False))])
                state[name.removeprefix(prefix)] = tensor
        self._random_state.check(state)
        return state if rank < self._num_stored else self._random_state.derive(state, rank)


_MAX_NAMES = 5  # per message


def load_training_state(
    ranks: CheckpointGroup,
    storage: Storage,
    path: Path,
    parts: TrainingParts,
    *,
    strict: bool,
    verify: str,
    missing_ok: bool,
) -> Any:
    """Fill the parts and return `extra`; see `TrainingStateIO.load`. Collective."""
    action = f"loading the training state from {path}"
    check_same_across_ranks("what they load", [action, f"missing_ok={missing_ok}"], ranks.group)
    found = _find(ranks, storage, path, parts, action, missing_ok=missing_ok)
    if found is None:
        return None
    directory, document = found
    with Loader(ranks, storage, verify) as loader:
        states = ranks.run_on_all_ranks(
            lambda: {
                name: scheduler_state(document.lr_schedulers[name], lr_scheduler, directory / TRAINING_STATE)
                for name, lr_scheduler in parts.lr_schedulers.items()
            },
            action,
        )
        loads = list(_loads(loader, directory, document, parts, strict=strict))
        random_state = RandomStateLoad(loader, directory, len(document.per_rank.of_rank), parts.random_state)
        for load in (*loads, random_state):
            load.check()
        left = document.unrequested_parts(parts.names())
        if left and ranks.rank == 0:
            get_dist_logger().warning(f"{directory} also holds {', '.join(left)}: not asked for, so not loaded")
        # First of all changes, because a dataloader can reject a position only when it is set.
        ranks.run_on_all_ranks(lambda: _fill_dataloaders(document, parts, ranks.rank), action)
        for load in loads:
            load.fill()

        def finish() -> None:
            for name, optimizer in parts.optimizers.items():
                if name not in document.gradients:
                    optimizer.pending_gradients().clear()
            for name, lr_scheduler in parts.lr_schedulers.items():
                lr_scheduler.load_state_dict(states[name])

        ranks.run_on_all_ranks(finish, action)
        random_state.fill()  # last: no random numbers are drawn after it
    return document.extra


def _warn_no_training_state(storage: Storage, root: Path) -> None:
    """Warn that a run starts from scratch although the directory is not empty: the path may be wrong. Rank 0 only."""
    names = sorted(storage.names(root)) if storage.kind(root) is not None else []
    if names:
        get_dist_logger().warning(
            f"{root} holds {format_list(names, _MAX_NAMES)}, but no training state: nothing is loaded, as"
            " missing_ok=True allows"
        )


def _find(
    ranks: CheckpointGroup, storage: Storage, path: Path, parts: TrainingParts, action: str, *, missing_ok: bool
) -> tuple[Path, TrainingDocument] | None:
    """Return directory and document as found by rank 0, or None if there is no training state. Collective."""

    def find() -> bytes:
        if ranks.rank != 0:
            return b""
        # The pointer file is not read, see Note [Checkpoint sequence numbers], and may be missing although there are
        # steps: a `latest` path that is not a directory stands for its parent.
        root = path.parent if path.name == LATEST and storage.kind(path) in (None, "file") else path
        found = _read_latest(storage, root, parts)
        if found is not None:
            return json.dumps({"directory": str(found[0]), "document": found[1].decode("utf-8")}).encode()
        if missing_ok and storage.kind(root) != "file":
            _warn_no_training_state(storage, root)
            return b"null"
        if storage.kind(root) is None:
            seen_from = "" if root.is_absolute() else f", seen from {Path.cwd()}"
            raise CheckpointError(
                f"{root} does not exist{seen_from}, so it holds no training state: give a directory that"
                " booster.save() wrote, or pass missing_ok=True to start without one"
            )
        raise CheckpointError(
            f"{root} holds no training state, neither directly nor as a step-... directory: give a directory"
            " that booster.save() wrote (one with a model alone is for load_model()), or pass missing_ok=True to start"
            " without one"
        )

    payloads, of_rank = all_gather_bytes(ranks.run_on_all_ranks(find, action), ranks.group)

    def parse() -> tuple[Path, TrainingDocument] | None:
        found = json.loads(payloads[of_rank[0]])
        if found is None:
            return None
        directory = Path(found["directory"])
        document = TrainingDocument.parse(found["document"].encode(), str(directory / TRAINING_STATE))
        lost = document.missing_parts(parts.names())
        if lost:
            lines = "".join(f"\n  - {line}" for line in lost)
            raise CheckpointError(
                f"{directory} lacks parts that were requested, so nothing was loaded:{lines}\nLeave these out, or give"
                " the names that they were saved under"
            )
        return directory, document

    return ranks.run_on_all_ranks(parse, action)


def _read_latest(storage: Storage, root: Path, parts: TrainingParts) -> tuple[Path, bytes] | None:
    """Return directory and document of the latest state, or None if there is none. Rank 0 only."""
    latest = StepDirectories(storage, root).latest()
    if latest is None:
        return None
    manifest = read_training_manifest(storage, latest.path)
    if manifest is None:
        raise CheckpointError(f"{latest.path} was removed while it was being loaded: load again")
    _check_documents(storage, latest.path, manifest, parts)
    document_path = resolve(storage, latest.path, TRAINING_STATE)
    return latest.path, storage.read_file(document_path, max_bytes=MAX_JSON_BYTES, inside=latest.path)


def _check_documents(storage: Storage, directory: Path, manifest: Manifest, parts: TrainingParts) -> None:
    """Check that the documents of the requested parts are those that were saved with the training state."""
    requested = [
        (MODEL, parts.models),
        (OPTIMIZER, parts.optimizers),
        (GRADIENTS, parts.optimizers),
        (RANDOM_STATE, {""}),
    ]
    for name, record in manifest.documents.items():
        folder, _, base = name.rpartition("/")
        is_requested = any(folder in folders and kind.names_of(base) is not None for kind, folders in requested)
        if name != TRAINING_STATE and not is_requested:
            continue
        raw = storage.read_file(resolve(storage, directory, name), max_bytes=MAX_JSON_BYTES, inside=directory)
        if len(raw) != record.num_bytes or zlib.crc32(raw) != record.crc32:
            raise CheckpointError(
                f"{directory / name} is not the file that this training state was saved with: it is damaged, or from"
                " another save into the same directory. Take another copy, or load only the model by load_model()"
            )


def _loads(
    loader: Loader, directory: Path, document: TrainingDocument, parts: TrainingParts, *, strict: bool
) -> Iterator[Load]:
    for name, model in parts.models.items():
        yield ModelLoad(loader, model, directory / name, strict=strict)
    for name, optimizer in parts.optimizers.items():
        yield OptimizerLoad(loader, optimizer, directory / name)
    for name, optimizer in parts.optimizers.items():
        if name in document.gradients:
            per_rank = document.per_rank
            counts = [per_rank.values[index]["gradients"][name] for index in per_rank.of_rank]
            yield AccumulatedGradientsLoad(loader, optimizer, directory / name, counts)


def _fill_dataloaders(document: TrainingDocument, parts: TrainingParts, rank: int) -> None:
    positions = document.per_rank.for_rank(rank).get("dataloaders", {})
    before = {name: loader.state_dict() for name, loader in parts.dataloaders.items()}
    try:
        for name, loader in parts.dataloaders.items():
            loader.load_state_dict(positions[name])
    except Exception:
        for name, loader in parts.dataloaders.items():
            loader.load_state_dict(before[name])
        raise


# Note [Training checkpoint files]
# Files of a directory: those of the first model and optimizer; each further model or optimizer in a subdirectory of its
# name; `random_state.safetensors` and, during an accumulation, `gradients.safetensors`, with every rank's own tensors
# and the reduced gradients; `training_state.json` with all values that are not tensors; and
# `training_state.manifest.json` with the checksums of the latter and of every part's manifest, so that a part
# replaced by another save is detected.

_ACTION = "saving the training state"


@dataclass(frozen=True, slots=True, kw_only=True)
class _GatheredState:
    """State gathered from all ranks before a save is planned; equal on all ranks but for the gradients themselves.

    Attributes:
        per_rank: Plain values of each rank.
        optimizer_values: Plain values of each optimizer as JSON.
        accumulated: Accumulated gradients of the optimizers for which any rank has some.
        reduced: Names of those optimizers of which some gradients are already reduced over ranks.
    """

    per_rank: PerRank
    optimizer_values: dict[str, str]
    accumulated: dict[str, AccumulatedGradients]
    reduced: list[str]


class TrainingStateIO:
    """Saves and loads training checkpoints of one process group.

    Args:
        ranks: Ranks that save and load together.
        storage: Storage of the files.
        saver: Saver that writes the checkpoints.
    """

    def __init__(self, ranks: CheckpointGroup, storage: Storage, saver: Saver) -> None:
        self._ranks = ranks
        self._storage = storage
        self._saver = saver
        self._issued: dict[Path, int] = {}  # sequence numbers by directory, of saves that may still be in flight

    def save(
        self,
        checkpoint: str | os.PathLike[str],
        parts: TrainingParts,
        *,
        extra: Any = None,
        metadata: Mapping[str, Any],
        options: SaveOptions,
        use_async: bool = False,
    ) -> None:
        """Save into the directory or, with a step, into a step directory below it. Collective.

        Args:
            checkpoint: Directory.
            parts: Objects to save.
            extra: Plain user values; those of rank 0 are written.
            metadata: JSON metadata of the save.
            options: Save options.
            use_async: If True, return after a copy into host memory.

        Raises:
            ConfigError: Invalid numbers, names or paths, or a save between clipping and step.
            CheckpointError: A value is not plain (the message names its key), or writing failed on some rank.
        """
        if not use_async:
            self._saver.wait()  # the replaced checkpoint is read below

        def check() -> tuple[Path, Mapping[str, Any]]:
            options.check()
            parts.check()
            return as_path(checkpoint), parts.random_state.capture()

        root, random_state = self._ranks.run_on_all_ranks(check, _ACTION)
        gathered = self._gather(parts)
        request = self._ranks.run_on_all_ranks(
            lambda: self._request(root, parts, random_state, gathered, extra, metadata, options), _ACTION
        )
        self._saver.save(request, use_async=use_async)

    def load(
        self,
        checkpoint: str | os.PathLike[str],
        parts: TrainingParts,
        *,
        strict: bool,
        verify: str,
        missing_ok: bool = False,
    ) -> Any:
        """Load from a directory, or from the latest committed step below it; return `extra`. Collective.

        Args:
            checkpoint: Directory.
            parts: Objects to fill; other contents of the checkpoint are ignored.
            strict: If True, models must have exactly the stored tensors.
            verify: "checksums" or "structure".
            missing_ok: If True, return None and change nothing if there is no training state.

        Raises:
            CheckpointError: A requested part is missing, does not match or is damaged; nothing was changed.
        """
        self._saver.wait()
        return load_training_state(
            self._ranks,
            self._storage,
            as_path(checkpoint),
            parts,
            strict=strict,
            verify=verify,
            missing_ok=missing_ok,
        )

    def _gather(self, parts: TrainingParts) -> _GatheredState:
        """Gather the ranks' plain values, and which accumulated gradients exist on any rank. Collective."""
        for model in parts.models.values():
            model.require_equal_copies()
        values_of = {
            name: self._ranks.run_on_all_ranks(partial(optimizer_values, optimizer), _ACTION)
            for name, optimizer in parts.optimizers.items()
        }
        gradients_of = {name: optimizer.pending_gradients() for name, optimizer in parts.optimizers.items()}
        for gradients in gradients_of.values():
            gradients.synchronize()
        local = self._ranks.run_on_all_ranks(lambda: _local_values(parts, gradients_of), _ACTION)
        payloads, of_rank = all_gather_bytes(local, self._ranks.group)
        values = [json_values.loads(raw, "the ranks' values") for raw in payloads]
        accumulated = [name for name in gradients_of if any(name in one["waiting"] for one in values)]
        saved_values = [
            {
                "dataloaders": rank_values["dataloaders"],
                "gradients": {name: rank_values["gradients"][name] for name in accumulated},
            }
            for rank_values in values
        ]
        return _GatheredState(
            per_rank=PerRank(values=saved_values, of_rank=list(of_rank)),
            optimizer_values=values_of,
            accumulated={name: gradients_of[name] for name in accumulated},
            reduced=[name for name in accumulated if any(name in one["reduced"] for one in values)],
        )

    def _request(
        self,
        root: Path,
        parts: TrainingParts,
        random_state: Mapping[str, Any],
        gathered: _GatheredState,
        extra: Any,
        metadata: Mapping[str, Any],
        options: SaveOptions,
    ) -> SaveRequest:
        step_directories = StepDirectories(self._storage, root)
        target = root if options.step is None else step_directories.step_path(options.step)
        document = TrainingDocument(
            facts=self._facts(metadata, options.step, root, step_directories),
            models=list(parts.models),
            optimizers=list(parts.optimizers),
            gradients=list(gathered.accumulated),
            reduced=gathered.reduced,
            lr_schedulers={name: scheduler_document(scheduler) for name, scheduler in parts.lr_schedulers.items()},
            dataloaders=list(parts.dataloaders),
            per_rank=gathered.per_rank,
            extra=extra,
        )
        return SaveRequest(
            target=target,
            is_directory=True,
            parts=list(self._parts(target, parts, random_state, gathered, options)),
            documents={TRAINING_STATE: document.encode()},
            manifest_name=TRAINING_STATE_MANIFEST,
            metadata=document.facts,
            is_stale=self._is_stale(target, parts),
            is_related=None if options.step is None else step_directories.is_step,
            after_commit=None if options.step is None else self._after_commit(step_directories, target.name, options),
            action=_ACTION,
        )

    def _parts(
        self,
        target: Path,
        parts: TrainingParts,
        random_state: Mapping[str, Any],
        gathered: _GatheredState,
        options: SaveOptions,
    ) -> Iterator[CheckpointPart]:
        to_model, to_optimizer = (
            save_target(
                target,
                kind,
                shard=True,
                size_per_shard=options.size_per_shard,
                use_safetensors=options.use_safetensors,
            )
            for kind in (MODEL, OPTIMIZER)
        )
        for name, model in parts.models.items():
            yield model_part(model, to_model, name)
        for name, optimizer in parts.optimizers.items():
            yield optimizer_part(optimizer, to_optimizer, gathered.optimizer_values[name], name)
        for name, pending in gathered.accumulated.items():
            yield gradients_part(pending, to_model, name)
        yield random_state_part(random_state, self._ranks.rank, to_model)

    def _facts(
        self, metadata: Mapping[str, Any], step: int | None, root: Path, folders: StepDirectories
    ) -> dict[str, Any]:
        sequence = 0  # only rank 0's value is written
        if self._ranks.rank == 0:
            sequence = max(folders.next_sequence(), self._issued.get(root, 0) + 1)
            self._issued[root] = sequence
        common = save_metadata(self._ranks.size)
        versions = {name: str(version) for name, version in common["versions"].items()}
        versions["python"] = platform.python_version()
        return {**common, **metadata, "versions": versions, "step": step, "sequence": sequence}

    def _after_commit(self, folders: StepDirectories, name: str, options: SaveOptions) -> Callable[[], None]:
        if self._ranks.rank == 0:
            folders.check_latest_writable()

        def announce() -> None:
            folders.update_latest(name)
            if options.keep_last is not None:
                folders.remove_old(options.keep_last)

        return announce

    def _is_stale(self, target: Path, parts: TrainingParts) -> Callable[[str], bool]:
        """Return a predicate for leftovers of the replaced save: RNG states, gradients and its other parts."""
        folders = set(parts.folders()) | {""}
        replaced = self._replaced_kinds(target) if self._ranks.rank == 0 else {}

        def is_stale(name: str) -> bool:
            folder, _, base = name.rpartition("/")
            always = (GRADIENTS, RANDOM_STATE) if folder in folders else ()
            for kind in (*always, *replaced.get(folder, ())):
                for is_safetensors in (True, False):
                    names = kind.names(is_safetensors=is_safetensors)
                    if names.may_have_written(base) or (kind == OPTIMIZER and base == names.groups):
                        return True
            return False

        return is_stale

    def _replaced_kinds(self, target: Path) -> dict[str, list[FileKind]]:
        try:
            manifest = read_training_manifest(self._storage, target)
        except CheckpointError:
            return {}  # damaged, but about to be replaced
        found: dict[str, list[FileKind]] = {}
        for document in () if manifest is None else manifest.documents:
            folder, _, base = document.rpartition("/")
            kinds = (MODEL, OPTIMIZER, GRADIENTS, RANDOM_STATE)
            found.setdefault(folder, []).extend(kind for kind in kinds if kind.names_of(base) is not None)
        return found


def _local_values(parts: TrainingParts, pending: Mapping[str, AccumulatedGradients]) -> bytes:
    values = {
        "dataloaders": {name: loader.state_dict() for name, loader in parts.dataloaders.items()},
        "gradients": {name: gradients.counts().to_plain() for name, gradients in pending.items()},
        "waiting": [name for name, gradients in pending.items() if gradients.has_gradients],
        "reduced": [name for name, gradients in pending.items() if gradients.reduced()],
    }
    return json_values.dumps(values, "a dataloader's position").encode()
