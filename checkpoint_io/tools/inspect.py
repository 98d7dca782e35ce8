"""Discovery and description of the checkpoints at a path, without reading tensor data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from booster.checkpoint_io.commit import paths_in
from booster.checkpoint_io.formats import json_values
from booster.checkpoint_io.formats.manifest import Manifest
from booster.checkpoint_io.formats.optimizer_values import parse_values
from booster.checkpoint_io.formats.tensor_files import GROUPS_KEY, open_tensor_file
from booster.checkpoint_io.layout import GRADIENTS, MODEL, OPTIMIZER, RANDOM_STATE, TRAINING_STATE, FileKind, FileNames
from booster.checkpoint_io.loading.fill import verify_ranges
from booster.checkpoint_io.loading.reader import StoredCheckpoint, open_checkpoint, read_document
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.training_state.document import TrainingDocument
from booster.checkpoint_io.training_state.retention import StepDirectories, read_training_manifest
from booster.errors import CheckpointError, ConfigError

KINDS = (MODEL, OPTIMIZER, RANDOM_STATE, GRADIENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One set of tensors: a model, an optimizer, random states.

    Attributes:
        kind: Kind of part.
        path: File, index or directory to open.
        folder: Subdirectory of the checkpoint, named after one of several models; empty for the checkpoint's directory.
        names: File names, or None for a single file, which may have any name.
    """

    kind: FileKind
    path: Path
    folder: str = ""
    names: FileNames | None = None

    @property
    def label(self) -> str:
        """Name in messages."""
        variant = f" ({self.names.prefix})" if self.names is not None and self.names.prefix else ""
        return f"{self.folder}/{self.kind.name}{variant}" if self.folder else f"{self.kind.name}{variant}"

    def open(self, storage: Storage, *, verifies: bool = False) -> StoredCheckpoint:
        """Open the part; sizes and structure are checked.

        Args:
            storage: Storage of the checkpoint.
            verifies: If True, also verify recorded checksums: files derived from the part get new checksums, which
                would hide damage.

        Raises:
            CheckpointError: The part is damaged, or a file is missing.
        """
        with ExitStack() as stack:
            stored = stack.enter_context(open_checkpoint(storage, self.path, self.kind))
            if verifies:
                verify_ranges(stored, 0, 1)
            stack.pop_all()
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """Parts of a checkpoint.

    Attributes:
        path: File, or directory with links and the latest step resolved.
        is_directory: Whether `path` is a directory.
        parts: At least one part.
        manifest: Manifest of a training checkpoint, else None.
    """

    path: Path
    is_directory: bool
    parts: tuple[StoredPart, ...]
    manifest: Manifest | None = None

    def only_part(self, kind: FileKind) -> StoredPart:
        """Return the only part of a kind; of several variants the one without a prefix, as in a load.

        Raises:
            CheckpointError: There is none, or more than one.
        """
        found = [part for part in self.parts if part.kind == kind]
        without_variant = [part for part in found if part.path == self.path]
        if len(found) == 1 or without_variant:
            return (without_variant or found)[0]
        if not found:
            labels = ", ".join(part.label for part in self.parts)
            raise CheckpointError(f"{self.path} holds no {kind.name}, only {labels}: give another path")
        listed = ", ".join(str(part.path) for part in found)
        raise CheckpointError(f"{self.path} holds several of the kind {kind.name}: give one of {listed}")


def find_contents(storage: Storage, path: str | os.PathLike[str]) -> CheckpointContents:
    """Find the parts of a checkpoint: a tensor file, an index, a checkpoint directory, or a directory of steps.

    Args:
        storage: Storage of the checkpoint.
        path: User's path. For a directory of `step-...` directories, the latest committed one is used.

    Raises:
        ConfigError: The path does not exist, or holds no checkpoint.
        CheckpointError: An index or manifest is damaged.
    """
    given = Path(path)
    real = Path(os.path.realpath(given))
    kind = storage.kind(real)
    if kind is None:
        raise ConfigError(f"{given} does not exist: give a checkpoint's directory or file")
    if kind != "directory":
        return CheckpointContents(path=given, is_directory=False, parts=(_part_of_file(storage, given),))
    latest = StepDirectories(storage, real).latest()
    return _contents_of_directory(storage, real if latest is None else latest.path)


def training_document(storage: Storage, contents: CheckpointContents) -> TrainingDocument | None:
    """Return the document of a training checkpoint, or None if there is none.

    Raises:
        CheckpointError: It differs from its checksum.
    """
    raw = read_training_state(storage, contents)
    return None if raw is None else TrainingDocument.parse(raw, str(contents.path / TRAINING_STATE))


def read_training_state(storage: Storage, contents: CheckpointContents) -> bytes | None:
    """Return the content of a training checkpoint's document, or None if there is none.

    Raises:
        CheckpointError: It differs from its checksum.
    """
    if contents.manifest is None:
        return None
    raw = read_document(storage, contents.path / TRAINING_STATE)
    contents.manifest.documents[TRAINING_STATE].check(raw, contents.path / TRAINING_STATE)
    return raw


def has_checksums(stored: StoredCheckpoint) -> bool:
    """Return whether every tensor file has recorded checksums."""
    return all(stored.record_of(file) is not None for file in stored.files)


def describe_training(document: TrainingDocument) -> dict[str, Any]:
    """Summarize a training checkpoint as JSON values."""
    extra = document.extra
    return {
        "facts": document.facts,
        "models": document.models,
        "optimizers": document.optimizers,
        "pending_gradients": document.gradients,
        "lr_schedulers": sorted(document.lr_schedulers),
        "dataloaders": document.dataloaders,
        "extra": sorted(map(str, extra)) if isinstance(extra, Mapping) else [],
    }


def describe(part: StoredPart, stored: StoredCheckpoint) -> dict[str, Any]:
    """Summarize an open part as JSON values.

    Args:
        part: Part of a checkpoint.
        stored: The open part.
    """
    specs = stored.specs
    file_of = {name: file.path.name for file in stored.files for name in file.specs}
    return {
        "kind": part.kind.name,
        "folder": part.folder,
        "variant": None if part.names is None else part.names.prefix,
        "checksums": has_checksums(stored),
        "num_tensors": len(specs),
        "num_elements": sum(spec.numel for spec in specs.values()),
        "num_bytes": sum(spec.num_bytes for spec in specs.values()),
        "dtypes": dict(Counter(dtype_name(spec.dtype) for spec in specs.values())),
        "files": [
            {"name": file.path.name, "num_tensors": len(file.specs), "num_bytes": file.num_bytes}
            for file in stored.files
        ],
        "facts": {} if stored.manifest is None else stored.manifest.metadata,
        "optimizer": _describe_optimizer(part, stored),
        "tensors": [
            {
                "name": name,
                "dtype": dtype_name(spec.dtype),
                "shape": list(spec.shape),
                "num_bytes": spec.num_bytes,
                "file": file_of[name],
            }
            for name, spec in specs.items()
        ],
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def _describe_optimizer(part: StoredPart, stored: StoredCheckpoint) -> dict[str, Any] | None:
    if part.kind != OPTIMIZER or stored.groups is None:
        return None
    values = parse_values(stored.groups, stored.specs, str(stored.path))
    groups: Sequence[Mapping[str, Any]] = values["param_groups"]
    return {
        "class": values.get("optimizer"),
        "num_skipped_steps": values["num_skipped_steps"],
        "loss_scaler": json_values.encode(values["loss_scaler"], "loss_scaler"),
        "param_groups": [json_values.encode(dict(group), f"group {index}") for index, group in enumerate(groups)],
    }


def _part_of_file(storage: Storage, path: Path) -> StoredPart:
    if path.suffix != ".json":
        file = open_tensor_file(storage, path)
        is_optimizer = GROUPS_KEY in file.metadata
        file.close()
        return StoredPart(kind=OPTIMIZER if is_optimizer else MODEL, path=path)
    for kind in KINDS:
        names = kind.names_of(path.name)
        if names is not None:
            return StoredPart(kind=kind, path=path, names=names)
    raise CheckpointError(f"{path} is not an index of a checkpoint: give the directory that contains it")


def _contents_of_directory(storage: Storage, directory: Path) -> CheckpointContents:
    manifest = read_training_manifest(storage, directory)
    parts = list(_parts_in(storage, directory, ""))
    for folder in _folders(storage, directory, parts, manifest):
        parts += _parts_in(storage, directory / folder, folder)
    if not parts:
        raise ConfigError(
            f"{directory} holds no checkpoint: neither a model nor an optimizer, nor directories of them, nor a"
            " complete step-... directory. Give the directory that holds the files"
        )
    return CheckpointContents(path=directory, is_directory=True, parts=tuple(parts), manifest=manifest)


def _parts_in(storage: Storage, directory: Path, folder: str) -> Iterator[StoredPart]:
    names = sorted(paths_in(storage, directory))
    for kind in KINDS:
        all_names = dict.fromkeys(file_names for name in names if (file_names := kind.names_of(name)) is not None)
        plain = [file_names for file_names in all_names if file_names.prefix is None]
        for file_names in all_names:
            # A directory opens as its only checkpoint, or the only one without a prefix, as in a load.
            is_default = len(all_names) == 1 or plain == [file_names]
            candidates = (file_names.manifest, file_names.index, file_names.single)
            file_name = next(name for name in candidates if name in names)
            yield StoredPart(
                kind=kind, path=directory if is_default else directory / file_name, folder=folder, names=file_names
            )


def _folders(
    storage: Storage, directory: Path, parts: Sequence[StoredPart], manifest: Manifest | None
) -> Sequence[str]:
    if manifest is not None:
        return sorted({name.rpartition("/")[0] for name in manifest.documents} - {""})
    if parts:
        return []  # other directories beside a model are not part of the checkpoint
    names = sorted(name for name in paths_in(storage, directory) if not name.startswith("."))
    return [name for name in names if storage.kind(directory / name) == "directory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPart:
    """Result of verifying a part.

    Attributes:
        num_files: Number of tensor files.
        num_tensors: Number of tensors.
        num_bytes: Total size of the tensors.
        has_checksums: Whether the data was compared with checksums; False if none were recorded.
    """

    num_files: int
    num_tensors: int
    num_bytes: int
    has_checksums: bool


def verify_part(storage: Storage, part: StoredPart) -> VerifiedPart:
    """Read and verify a part.

    Args:
        storage: Storage of the checkpoint.
        part: Model, optimizer or other set of tensors.

    Raises:
        CheckpointError: Sizes, structure, coverage or checksums differ from those of the save, or a file is missing.
    """
    with part.open(storage) as stored:
        if part.kind == OPTIMIZER and stored.groups is not None:
            parse_values(stored.groups, stored.specs, str(stored.path))
        is_recorded = has_checksums(stored)
        stored.check_documents()
        verify_ranges(stored, 0, 1)
        return VerifiedPart(
            num_files=len(stored.files),
            num_tensors=len(stored.specs),
            num_bytes=sum(spec.num_bytes for spec in stored.specs.values()),
            has_checksums=is_recorded,
        )


def verify_documents(storage: Storage, contents: CheckpointContents) -> int:
    """Verify the documents of a training checkpoint and return their number.

    Raises:
        CheckpointError: A document is missing or differs from its checksum.
    """
    if contents.manifest is None:
        return 0
    for name, record in contents.manifest.documents.items():
        record.check(read_document(storage, contents.path / name), contents.path / name)
    return len(contents.manifest.documents)


def orphaned_shards(storage: Storage, contents: CheckpointContents) -> list[str]:
    """Return shards that belong to no part, because their index and manifest are missing."""
    if not contents.is_directory:
        return []
    orphaned: list[str] = []
    for folder in dict.fromkeys(("", *(part.folder for part in contents.parts))):
        all_names = [part.names for part in contents.parts if part.folder == folder and part.names is not None]
        for name in sorted(paths_in(storage, contents.path / folder)):
            is_shard = FileNames.is_shard_like(name) and Path(name).suffix in (".safetensors", ".bin")
            if is_shard and not any(file_names.may_have_written(name) for file_names in all_names):
                orphaned.append(f"{folder}/{name}".lstrip("/"))
    return orphaned
