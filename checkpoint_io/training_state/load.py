"""Load of a full training checkpoint: all but the data is checked on all ranks before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from booster.checkpoint_io.formats.manifest import DocumentRecord, Manifest
from booster.checkpoint_io.layout import GRADIENTS, MODEL, OPTIMIZER, RANDOM_STATE, TRAINING_STATE
from booster.checkpoint_io.loading.fill import read_slices
from booster.checkpoint_io.loading.load import Loader, ModelLoad, OptimizerLoad, incomplete_on_failure
from booster.checkpoint_io.loading.reader import StoredCheckpoint, read_document
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.storage import Storage
from booster.comm import all_gather_bytes, check_same_across_ranks
from booster.errors import CheckpointError, format_list
from booster.interface import TensorSlice
from booster.interface.checkpoint_io import TrainingParts
from booster.logger import get_dist_logger

from .accumulated_gradients import AccumulatedGradientsLoad
from .document import TrainingDocument, scheduler_state
from .retention import LATEST, StepDirectories, read_training_manifest

_MAX_NAMES = 5  # per message
_MAX_ATTEMPTS = 20  # of a load beside saves that remove what it has found


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
    """Load from a directory, or from the latest committed step below it; return `extra`. Collective.

    For arguments and errors, see `CheckpointIO.load_training_state` and `Booster.load`.
    """
    action = f"loading the training state from {path}"
    check_same_across_ranks("what they load", [action, f"missing_ok={missing_ok}"], ranks.group)
    for attempt in range(_MAX_ATTEMPTS):
        found = _find(ranks, storage, path, parts, action, missing_ok=missing_ok)
        if found is None:
            return None
        directory, document = found
        with Loader(ranks, storage, verify) as loader:
            try:
                load = _TrainingStateLoad(loader, directory, document, parts, strict, action)
                load.check()
            except CheckpointError:  # on all ranks, and nothing was changed
                if attempt + 1 < _MAX_ATTEMPTS and _was_replaced(ranks, storage, path, directory, action):
                    continue
                raise
            load.fill()
            return document.extra
    raise AssertionError("the last attempt returns or raises")


@dataclass(slots=True, eq=False)
class _TrainingStateLoad:
    """Load of all parts from one directory: `check`, which changes nothing, and `fill`. Both are collective."""

    _loader: Loader
    _directory: Path
    _document: TrainingDocument
    _parts: TrainingParts
    _strict: bool
    _action: str
    # From `check` for `fill`.
    _loads: list[ModelLoad | OptimizerLoad | AccumulatedGradientsLoad] = field(init=False)
    _schedules: dict[str, dict[str, Any]] = field(init=False)
    _random_state: Mapping[str, torch.Tensor] = field(init=False)

    def check(self) -> None:
        """Read what is needed to know that all parts fit."""
        ranks, document = self._loader.ranks, self._document
        self._loads = list(self._part_loads())
        self._schedules = ranks.run_on_all_ranks(
            lambda: {
                name: scheduler_state(document.lr_schedulers[name], lr_scheduler, self._directory / TRAINING_STATE)
                for name, lr_scheduler in self._parts.lr_schedulers.items()
            },
            self._action,
        )
        for load in self._loads:
            load.check()
        stored = self._loader.open(self._directory, RANDOM_STATE)
        self._loader.verify(stored)
        self._random_state = ranks.run_on_all_ranks(lambda: self._read_random_state(stored), self._action)

    def fill(self) -> None:
        """Fill the parts."""
        ranks, document, parts = self._loader.ranks, self._document, self._parts
        left = document.unrequested_parts(parts.names())
        if left and ranks.rank == 0:
            get_dist_logger().warning(f"{self._directory} also holds {', '.join(left)}: not asked for, so not loaded")
        # First of all changes, because a dataloader can reject a position only when it is set.
        before = {name: loader.state_dict() for name, loader in parts.dataloaders.items()}
        try:
            ranks.run_on_all_ranks(self._fill_dataloaders, self._action)
        except Exception:  # on all ranks
            for name, loader in parts.dataloaders.items():
                loader.load_state_dict(before[name])
            raise
        with incomplete_on_failure([*parts.models.values(), *parts.optimizers.values()]):
            for load in self._loads:
                load.fill()
            ranks.run_on_all_ranks(self._finish, self._action)
        # Last: no random numbers are drawn after it.
        ranks.run_on_all_ranks(lambda: parts.random_state.restore(self._random_state), self._action)

    def _read_random_state(self, stored: StoredCheckpoint) -> Mapping[str, torch.Tensor]:
        random_state, rank = self._parts.random_state, self._loader.ranks.rank
        num_stored = len(self._document.per_rank.of_rank)
        prefix = f"rank{rank % num_stored}."
        state: dict[str, torch.Tensor] = {}
        for name, spec in stored.specs.items():
            if name.startswith(prefix):
                tensor = torch.empty(spec.shape, dtype=spec.dtype)
                read_slices(stored, [(name, TensorSlice.full(name, tensor, primary=False))])
                state[name.removeprefix(prefix)] = tensor
        random_state.check(state)
        return state if rank < num_stored else random_state.derive(state, rank)

    def _part_loads(self) -> Iterator[ModelLoad | OptimizerLoad | AccumulatedGradientsLoad]:
        loader, document, parts = self._loader, self._document, self._parts
        for name, model in parts.models.items():
            frozen = parts.frozen.get(name, ())
            yield ModelLoad(loader, model, self._directory / name, strict=self._strict, frozen=frozen)
        for name, optimizer in parts.optimizers.items():
            yield OptimizerLoad(loader, optimizer, self._directory / name)
        for name, optimizer in parts.optimizers.items():
            if name in document.gradients:
                per_rank = document.per_rank
                counts = [per_rank.values[index]["gradients"][name] for index in per_rank.of_rank]
                yield AccumulatedGradientsLoad(loader, optimizer, self._directory / name, counts)

    def _fill_dataloaders(self) -> None:
        positions = self._document.per_rank.for_rank(self._loader.ranks.rank).get("dataloaders", {})
        for name, loader in self._parts.dataloaders.items():
            loader.load_state_dict(positions[name])

    def _finish(self) -> None:
        for name, optimizer in self._parts.optimizers.items():
            if name not in self._document.gradients:
                optimizer.pending_gradients().clear()
        for name, lr_scheduler in self._parts.lr_schedulers.items():
            lr_scheduler.load_state_dict(self._schedules[name])


def _was_replaced(ranks: CheckpointGroup, storage: Storage, path: Path, directory: Path, action: str) -> bool:
    """Return whether a save has removed a step below `path` since it was found, because of newer ones. Collective."""

    def look() -> bytes:
        is_gone = ranks.rank == 0 and directory != path and storage.kind(directory) is None
        return b"gone" if is_gone else b""

    payloads, of_rank = all_gather_bytes(ranks.run_on_all_ranks(look, action), ranks.group)
    return payloads[of_rank[0]] == b"gone"


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
                " booster.save() wrote, or pass missing_ok=True to load() to start without one"
            )
        raise CheckpointError(
            f"{root} holds no training state, neither directly nor as a step-... directory: give a directory"
            " that booster.save() wrote (one with a model alone is for load_model()), or pass missing_ok=True to"
            " load() to start without one"
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
    for attempt in range(_MAX_ATTEMPTS):
        latest = StepDirectories(storage, root).latest()
        if latest is None:
            return None
        try:
            manifest = read_training_manifest(storage, latest.path)
            if manifest is None:
                raise CheckpointError(f"{latest.path} was removed while it was being loaded: load again")
            return latest.path, _read_checked(storage, latest.path, manifest, parts)
        except (CheckpointError, OSError):
            # Unless a newer step has replaced it meanwhile.
            if attempt + 1 == _MAX_ATTEMPTS or latest.path == root or storage.kind(latest.path) is not None:
                raise
    raise AssertionError("the last attempt returns or raises")


def _read_checked(storage: Storage, directory: Path, manifest: Manifest, parts: TrainingParts) -> bytes:
    """Return the document of a training state, once those of the requested parts are known to be of the same save."""
    document = b""
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
        raw = read_document(storage, directory / name)
        document = raw if name == TRAINING_STATE else document
        if DocumentRecord.of(raw) != record:
            raise CheckpointError(
                f"{directory / name} is not the file that this training state was saved with: it is damaged, or from"
                " another save into the same directory. Take another copy, or load only the model by load_model()"
            )
    return document
