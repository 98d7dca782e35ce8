"""An open checkpoint: its tensors by name, in whichever file they are, and what vouches for them."""

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

__all__ = ["Checkpoint", "read_recorded"]


class Checkpoint:
    """An open checkpoint; a context manager that closes its files.

    Args:
        storage: Where it is.
        path: Its manifest, index or only file.
        files: The files of tensors, open.
        groups: The optimizer's plain values as JSON, where the checkpoint is an optimizer's.
        manifest: Sizes and checksums of everything, where a directory has them.
        raw_manifest: The bytes of the manifest.

    Attributes:
        specs: Shape and format of every tensor, from the files that hold them.

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
            twice = next((name for name in file.specs if name in self._file_of), None)
            if twice is not None:
                raise CheckpointError(
                    f"{path}: {twice!r} is in two files, {self._file_of[twice].path.name} and {file.path.name}, one of"
                    " them stale: remove what is left over"
                )
            self.specs.update(file.specs)
            self._file_of.update(dict.fromkeys(file.specs, file))

    @property
    def identity(self) -> str:
        """A text that is another one for another save, as far as the files that were opened tell."""
        heads = [
            (file.path.name, file.num_bytes, getattr(self.record_of(file), "head_crc32", 0)) for file in self.files
        ]
        return f"{zlib.crc32(self._raw_manifest):08x} {sorted(heads)}"

    def locate(self, name: str) -> tuple[OpenFile, int] | None:
        """Returns the file and the offset of a tensor's bytes; None where only `read` gives them, as in `.bin`."""
        return self._file_of[name].locate(name)

    def record_of(self, file: TensorFile) -> FileRecord | None:
        """Returns the checksums of one of the files; None where nobody recorded any."""
        if self.manifest is not None:
            return self.manifest.files.get(file.path.name)
        return file.own_record

    def read(self, name: str) -> torch.Tensor:
        """Returns one tensor, on the CPU. The caller must not write into it."""
        return self._file_of[name].read(name)

    def check_documents(self) -> None:
        """Compares the documents that the manifest records with what is on the disk.

        Raises:
            CheckpointError: One is missing or not as it was saved.
        """
        if self.manifest is None or not self.manifest.documents:
            return
        directory = open_directory(self.storage, self.path.parent)
        try:
            for name in self.manifest.documents:
                read_recorded(directory, name, self.manifest)
        except CheckpointError:
            # Another save may have taken the place of this one since; its tensors are open still, and whole.
            if open_directory(self.storage, self.path.parent).read(self.path.name) == self._raw_manifest:
                raise

    def close(self) -> None:
        """Closes the files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_recorded(directory: DirectoryReader, name: str, manifest: Manifest) -> bytes:
    """Returns a document as it was saved.

    Args:
        directory: Where it is.
        name: The document.
        manifest: What says how it was saved.

    Raises:
        CheckpointError: It is not recorded, missing, or has another size or checksum.
    """
    record = manifest.documents.get(name)
    path = directory.path / name
    if record is None:
        raise CheckpointError(
            f"{path} is not recorded in the manifest beside it: the files are of different saves, or the manifest is"
            " damaged. Take another copy of the checkpoint"
        )
    raw = directory.read(name)
    if len(raw) != record.num_bytes or zlib.crc32(raw) != record.crc32:
        raise CheckpointError(
            f"{path} is not as it was saved: it is damaged, edited or of another save. Take another copy of the"
            " checkpoint"
        )
    return raw
