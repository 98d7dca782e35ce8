"""Open checkpoint: tensors by name over all files, with their recorded checksums."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from booster.checkpoint_io.files.manifest import FileRecord, Manifest
from booster.checkpoint_io.files.tensor_files import TensorFile
from booster.checkpoint_io.loading.directory_reader import DirectoryReader, open_directory
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["StoredCheckpoint", "read_recorded"]


class StoredCheckpoint:
    """Open checkpoint; a context manager that closes its files.

    Args:
        storage: Storage of the files.
        path: Manifest, index or single file.
        files: Open tensor files.
        groups: Optimizer's plain values as JSON. Optional, for optimizer checkpoints.
        manifest: Sizes and checksums of all files. Optional.
        raw_manifest: Content of the manifest file.

    Attributes:
        specs: Shape and dtype of every tensor, from the files that hold them.

    Raises:
        CheckpointError: A tensor is in two files.
    """

    def __init__(
        self,
        storage: Storage,
        path: Path,
        files: Sequence[TensorFile],
        groups: bytes | None = None,
        manifest: Manifest | None = None,
        raw_manifest: bytes = b"",
    ) -> None:
        self._raw_manifest = raw_manifest
        self.storage = storage
        self.path = path
        self.files = tuple(files)
        self.groups = groups
        self.manifest = manifest
        self.specs: dict[str, TensorSpec] = {}
        self._file_of: dict[str, TensorFile] = {}
        for file in self.files:
            duplicate = next((name for name in file.specs if name in self._file_of), None)
            if duplicate is not None:
                raise CheckpointError(
                    f"{path}: {duplicate!r} is in two files, {self._file_of[duplicate].path.name} and {file.path.name}, and one"
                    " of them is stale: remove it"
                )
            self.specs.update(file.specs)
            self._file_of.update(dict.fromkeys(file.specs, file))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the save, from manifest and heads; differs between saves as far as these record it."""
        heads = [
            (file.path.name, file.num_bytes, getattr(self.record_of(file), "head_crc32", 0)) for file in self.files
        ]
        return f"{zlib.crc32(self._raw_manifest):08x} {sorted(heads)}"

    def locate(self, name: str) -> tuple[OpenFile, int] | None:
        """Return file and offset of a tensor's bytes, or None if only `read` can access it, as for `.bin`."""
        return self._file_of[name].locate(name)

    def record_of(self, file: TensorFile) -> FileRecord | None:
        """Return the recorded checksums of a file, or None if there are none."""
        if self.manifest is not None:
            return self.manifest.files.get(file.path.name)
        return file.embedded_record

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU. The caller must not modify it."""
        return self._file_of[name].read(name)

    def check_documents(self) -> None:
        """Verify the documents that the manifest records.

        Raises:
            CheckpointError: A document is missing or differs from its checksum.
        """
        if self.manifest is None or not self.manifest.documents:
            return
        directory = open_directory(self.storage, self.path.parent)
        try:
            for name in self.manifest.documents:
                read_recorded(directory, name, self.manifest)
        except CheckpointError:
            # Another save may have replaced this one since; its tensor files are still open and consistent.
            if open_directory(self.storage, self.path.parent).read(self.path.name) == self._raw_manifest:
                raise

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_recorded(directory: DirectoryReader, name: str, manifest: Manifest) -> bytes:
    """Read and verify a document.

    Args:
        directory: Directory of the document.
        name: File name.
        manifest: Manifest that records it.

    Raises:
        CheckpointError: The document is not recorded, missing, or differs in size or checksum.
    """
    record = manifest.documents.get(name)
    path = directory.path / name
    if record is None:
        raise CheckpointError(
            f"{path} is not recorded in the manifest beside it: the files are from different saves, or the manifest is"
            " damaged. Take another copy of the checkpoint"
        )
    raw = directory.read(name)
    if len(raw) != record.num_bytes or zlib.crc32(raw) != record.crc32:
        raise CheckpointError(
            f"{path} differs from its checksum: it is damaged, edited or from another save. Take another copy of the"
            " checkpoint"
        )
    return raw
