"""What a reader finds in one directory, while other processes may save into it."""

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

_NUM_LOOKS = 3  # a file may move to its place between the look and the opening, and once more in the next commit
_TRANSIENT = (errno.ENOENT, errno.ESTALE)


class DirectoryReader:
    """Opens the files of a directory, wherever a commit that is under way has them at this moment.

    Args:
        storage: Where it is.
        path: The directory.

    Raises:
        OSError: It is no directory, or cannot be listed.
    """

    def __init__(self, storage: Storage, path: Path) -> None:
        self.path = path
        self._storage = storage
        self._view = DirectoryView(storage, path)
        self.names = self._view.names()

    def open(self, name: str, expected: FileRecord | None = None) -> TensorFile:
        """Opens a file of tensors; see `open_tensor_file`."""
        return self._found(
            name, lambda path, inside: open_tensor_file(self._storage, path, inside=inside, expected=expected)
        )

    def read(self, name: str) -> bytes:
        """Returns the bytes of a small file, of at most 64 MiB."""
        return self._found(
            name, lambda path, inside: self._storage.read_file(path, max_bytes=MAX_JSON_BYTES, inside=inside)
        )

    def _found(self, name: str, action: Callable[[Path, Path], T]) -> T:
        for _ in range(_NUM_LOOKS - 1):
            try:
                return action(*self._place(name))
            except CheckpointError as error:
                if not is_transient(error):
                    raise
            self._look_again()
        return action(*self._place(name))

    def _place(self, name: str) -> tuple[Path, Path]:
        """Returns where a file is, and the directory that links of it may not leave."""
        path = self._view.path(name)
        # What was committed together with its parent directory lies in a folder of a folder beside it.
        return path, self.path if path.is_relative_to(self.path) else path.parent.parent

    def _look_again(self) -> None:
        try:
            self._view = DirectoryView(self._storage, self.path)
        except OSError as error:
            raise cannot_open(self.path, error) from error


def open_directory(storage: Storage, path: Path) -> DirectoryReader:
    """Returns the reader of a directory.

    Raises:
        CheckpointError: It is no directory, or cannot be listed.
    """
    try:
        return DirectoryReader(storage, path)
    except OSError as error:
        raise cannot_open(path, error) from error


def cannot_open(path: Path, error: Exception) -> CheckpointError:
    """Returns the error for a path that the file system gives an error for."""
    return CheckpointError(f"cannot open {str(path)!r}: {error}. Check the path and its permissions")


def is_transient(error: CheckpointError) -> bool:
    """Returns whether the reason is a file that is not there, which it may be in a moment."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _TRANSIENT
