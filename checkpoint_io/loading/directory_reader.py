"""Reader of one directory while other processes may save into it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from booster.checkpoint_io.commit import DirectoryView
from booster.checkpoint_io.files.manifest import FileRecord
from booster.checkpoint_io.files.strict_json import MAX_JSON_BYTES
from booster.checkpoint_io.files.tensor_files import TensorFile, open_tensor_file
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

__all__ = ["DirectoryReader", "cannot_open", "is_transient", "open_directory"]

T = TypeVar("T")

_NUM_ATTEMPTS = 3  # a file may be moved between listing and opening, and again by the next commit
_TRANSIENT = (errno.ENOENT, errno.ESTALE)


class DirectoryReader:
    """Opens the files of a directory, including those of a commit that is not installed yet.

    Args:
        storage: Storage of the directory.
        path: Directory.

    Raises:
        OSError: The path is not a directory, or cannot be listed.
    """

    def __init__(self, storage: Storage, path: Path) -> None:
        self.path = path
        self._storage = storage
        self._view = DirectoryView(storage, path)
        self.names = self._view.names()

    def open(self, name: str, expected: FileRecord | None = None) -> TensorFile:
        """Open a tensor file; see `open_tensor_file`."""
        return self._retry(
            name, lambda path, inside: open_tensor_file(self._storage, path, inside=inside, expected=expected)
        )

    def read(self, name: str) -> bytes:
        """Return the content of a small file of at most 64 MiB."""
        return self._retry(
            name, lambda path, inside: self._storage.read_file(path, max_bytes=MAX_JSON_BYTES, inside=inside)
        )

    def _retry(self, name: str, action: Callable[[Path, Path], T]) -> T:
        for _ in range(_NUM_ATTEMPTS - 1):
            try:
                return action(*self._locate(name))
            except CheckpointError as error:
                if not is_transient(error):
                    raise
            self._refresh()
        return action(*self._locate(name))

    def _locate(self, name: str) -> tuple[Path, Path]:
        """Return the path of a file, and the directory that its links must not leave."""
        path = self._view.path(name)
        # A directory committed together with its parent is a subdirectory of the parent's commit directory.
        return path, self.path if path.is_relative_to(self.path) else path.parent.parent

    def _refresh(self) -> None:
        try:
            self._view = DirectoryView(self._storage, self.path)
        except OSError as error:
            raise cannot_open(self.path, error) from error


def open_directory(storage: Storage, path: Path) -> DirectoryReader:
    """Return a reader of a directory.

    Raises:
        CheckpointError: The path is not a directory, or cannot be listed.
    """
    try:
        return DirectoryReader(storage, path)
    except OSError as error:
        raise cannot_open(path, error) from error


def cannot_open(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a path that cannot be opened."""
    return CheckpointError(f"cannot open {str(path)!r}: {error}. Check the path and its permissions")


def is_transient(error: CheckpointError) -> bool:
    """Return whether the cause is a missing or stale file, which may appear on retry."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _TRANSIENT
