"""Verification of a checkpoint's files: tensors, documents, and leftover shards."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from booster.checkpoint_io.commit import list_directory, resolve
from booster.checkpoint_io.files.optimizer_values import parse_values
from booster.checkpoint_io.files.strict_json import MAX_JSON_BYTES
from booster.checkpoint_io.inspecting.inspection import CheckpointContents, StoredPart, has_checksums
from booster.checkpoint_io.layout import OPTIMIZER, FileNames
from booster.checkpoint_io.loading.verification import verify_ranges
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

__all__ = ["VerifiedPart", "orphaned_shards", "verify_documents", "verify_part"]


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
        folder, _, base = name.rpartition("/")
        path = resolve(storage, contents.path / folder, base)
        raw = storage.read_file(path, max_bytes=MAX_JSON_BYTES, inside=contents.path)
        if len(raw) != record.num_bytes or zlib.crc32(raw) != record.crc32:
            raise CheckpointError(
                f"{path} is not the file that was written: its size or checksum differs. Take another copy of it"
            )
    return len(contents.manifest.documents)


def orphaned_shards(storage: Storage, contents: CheckpointContents) -> list[str]:
    """Return shards that belong to no part, because their index and manifest are missing."""
    if not contents.is_directory:
        return []
    return list(_orphaned_shards(storage, contents))


def _orphaned_shards(storage: Storage, contents: CheckpointContents) -> Iterator[str]:
    for folder in dict.fromkeys(("", *(part.folder for part in contents.parts))):
        all_names = [part.names for part in contents.parts if part.folder == folder and part.names is not None]
        for name in list_directory(storage, contents.path / folder):
            is_shard = FileNames.is_shard_like(name) and Path(name).suffix in (".safetensors", ".bin")
            if is_shard and not any(file_names.may_have_written(name) for file_names in all_names):
                yield f"{folder}/{name}".lstrip("/")
