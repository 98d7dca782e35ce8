"""Load of a training checkpoint: find it, check everything that is requested, then fill."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from booster.checkpoint_io.commit import resolve
from booster.checkpoint_io.files.manifest import Manifest
from booster.checkpoint_io.files.strict_json import MAX_JSON_BYTES
from booster.checkpoint_io.layout import GRADIENTS, MODEL, OPTIMIZER, RANDOM_STATE
from booster.checkpoint_io.loading.loader import Load, Loader, ModelLoad, OptimizerLoad
from booster.checkpoint_io.ranks import CheckpointGroup
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.training.lr_scheduler_state import scheduler_state
from booster.checkpoint_io.training.rank_tensors import RandomStateLoad
from booster.checkpoint_io.training.rotation import LATEST, TRAINING_STATE, StepDirectories, read_training_manifest
from booster.checkpoint_io.training.training_document import TrainingDocument
from booster.checkpoint_io.training.training_parts import TrainingParts
from booster.checkpoint_io.training.waiting_gradients import GradientsLoad
from booster.comm import check_same_across_ranks
from booster.errors import CheckpointError
from booster.logger import get_dist_logger

__all__ = ["load_training_state"]

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
        states = ranks.run_on_all_ranks(lambda: _scheduler_states(document, parts, directory), action)
        loads = list(_loads(loader, directory, document, parts, strict=strict))
        random_state = RandomStateLoad(loader, directory, len(document.per_rank.of_rank), parts.random_state)
        for load in (*loads, random_state):
            load.check()
        _warn_unrequested(ranks, document, parts, directory)
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


def _warn_unrequested(
    ranks: CheckpointGroup, document: TrainingDocument, parts: TrainingParts, directory: Path
) -> None:
    left = document.unrequested_parts(parts.names())
    if left and ranks.rank == 0:
        get_dist_logger().warning(f"{directory} also holds {', '.join(left)}: not asked for, so not loaded")


def _warn_no_training_state(storage: Storage, root: Path) -> None:
    """Warn that a run starts from scratch although the directory is not empty: the path may be wrong. Rank 0 only."""
    names = sorted(storage.names(root)) if storage.kind(root) is not None else []
    if names:
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        get_dist_logger().warning(
            f"{root} holds {', '.join(names[:_MAX_NAMES])}{more}, but no training state: nothing is loaded, as"
            " missing_ok=True allows"
        )


def _relative_to(path: Path) -> str:
    return "" if path.is_absolute() else f", seen from {Path.cwd()}"


def _find(
    ranks: CheckpointGroup, storage: Storage, path: Path, parts: TrainingParts, action: str, *, missing_ok: bool
) -> tuple[Path, TrainingDocument] | None:
    """Return directory and document as found by rank 0, or None if there is no training state. Collective."""

    def find() -> bytes:
        if ranks.rank != 0:
            return b""
        root = _root(storage, path)
        found = _read_latest(storage, root, parts)
        if found is not None:
            return json.dumps({"directory": str(found[0]), "document": found[1].decode("utf-8")}).encode()
        if missing_ok and storage.kind(root) != "file":
            _warn_no_training_state(storage, root)
            return b"null"
        if storage.kind(root) is None:
            raise CheckpointError(
                f"{root} does not exist{_relative_to(root)}, so it holds no training state: give a directory that"
                " booster.save() wrote, or pass missing_ok=True to start without one"
            )
        raise CheckpointError(
            f"{root} holds no training state, neither directly nor as a step-... directory: give a directory"
            " that booster.save() wrote (one with a model alone is for load_model()), or pass missing_ok=True to start"
            " without one"
        )

    payloads, of_rank = ranks.all_gather_distinct(ranks.run_on_all_ranks(find, action))

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


def _root(storage: Storage, path: Path) -> Path:
    """Return the parent of a `latest` path that is not a directory, else the path itself. Rank 0 only.

    The pointer file is not read, see Note [Checkpoint sequence numbers], and may be missing although there are steps.
    """
    return path.parent if path.name == LATEST and storage.kind(path) in (None, "file") else path


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
            counts = document.per_rank.all_ranks("gradients", name)
            yield GradientsLoad(loader, optimizer, directory / name, counts)


def _scheduler_states(document: TrainingDocument, parts: TrainingParts, directory: Path) -> dict[str, dict[str, Any]]:
    document_path = directory / TRAINING_STATE
    return {
        name: scheduler_state(document.lr_schedulers[name], lr_scheduler, document_path)
        for name, lr_scheduler in parts.lr_schedulers.items()
    }


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
