"""Whether what is on the disk is what was saved: parts of a checkpoint, its documents, and what lies beside them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from booster.checkpoint_io.commit import listing, resolve
from booster.checkpoint_io.files.optimizer_values import parse_values
from booster.checkpoint_io.files.strict_json import MAX_JSON_BYTES
from booster.checkpoint_io.inspecting.inspection import Contents, Part, has_checksums
from booster.checkpoint_io.layout import OPTIMIZER, FileNames
from booster.checkpoint_io.loading.verification import verify_ranges
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

__all__ = ["VerifiedPart", "lost_shards", "verify_documents", "verify_part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPart:
    """What was checked of a part.

    Attributes:
        num_files: Files of tensors.
        num_tensors: Tensors in them.
        num_bytes: Size of the tensors.
        has_checksums: Whether their bytes were compared with checksums; False: none were recorded.
    """

    num_files: int
    num_tensors: int
    num_bytes: int
    has_checksums: bool


def verify_part(storage: Storage, part: Part) -> VerifiedPart:
    """Read a part once and returns what was checked.

    Args:
        storage: Where it is.
        part: The model, optimizer or other set of tensors.

    Raises:
        CheckpointError: Sizes, structure, tiling or checksums are not those of the save, or a file is missing.
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


def verify_documents(storage: Storage, contents: Contents) -> int:
    """Check the documents of a whole training state and returns how many there are.

    Raises:
        CheckpointError: One is missing, or not the one that was written.
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


def lost_shards(storage: Storage, contents: Contents) -> list[str]:
    """Return the shards that belong to no part: whatever named them is gone."""
    if not contents.is_directory:
        return []
    return list(_lost_shards(storage, contents))


def _lost_shards(storage: Storage, contents: Contents) -> Iterator[str]:
    for folder in dict.fromkeys(("", *(part.folder for part in contents.parts))):
        owners = [part.names for part in contents.parts if part.folder == folder and part.names is not None]
        for name in listing(storage, contents.path / folder):
            is_shard = FileNames.is_shard_like(name) and Path(name).suffix in (".safetensors", ".bin")
            if is_shard and not any(owner.owns(name) for owner in owners):
                yield f"{folder}/{name}".lstrip("/")
