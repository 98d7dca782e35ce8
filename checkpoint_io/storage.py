"""The one place that touches the file system."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from booster.errors import CheckpointError

__all__ = ["Storage"]

_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


class Storage:
    """The local file system. A subclass may record what is done, or fail on purpose."""

    # Writing.

    def make_directory(self, path: Path) -> None:
        """Makes one new directory, with the modes of the process's umask."""
        path.mkdir()

    def make_parents(self, path: Path) -> None:
        """Makes the directories above the path that are not there yet, on the disk as well."""
        missing = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in missing:
            self.sync_path(parent.parent)

    def create(self, path: Path) -> BinaryIO:
        """Opens a new file for writing, with the modes of the process's umask; never through a link."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o666)
        return os.fdopen(descriptor, "wb")

    def sync(self, file: BinaryIO) -> None:
        """Waits until everything written to the file is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_path(self, path: Path) -> None:
        """Waits until a file's content, or a directory's entries, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Gives a file or a directory another name, in one step; a file that had it is gone."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Removes a file or a link."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Removes a directory and what is in it."""
        shutil.rmtree(path)

    def lock(self, path: Path) -> int | None:
        """Marks a file or directory as in use until the descriptor is closed; None where another process did so."""
        descriptor = os.open(path, os.O_RDONLY | _NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            # A file system without locks: nobody can mark anything there, so nothing is marked.
            return descriptor
        return descriptor

    def unlock(self, descriptor: int) -> None:
        """Ends a mark."""
        os.close(descriptor)

    # Reading.

    def names(self, directory: Path) -> list[str]:
        """Returns the names in a directory, sorted."""
        return sorted(os.listdir(directory))

    def open_regular(self, path: Path, *, inside: Path | None = None) -> FileIO:
        """Opens a regular file for reading, and nothing else: opening a pipe would wait for ever.

        Args:
            path: The file.
            inside: The directory that links may not leave; None: links are followed anywhere. In a cache of the
                Hugging Face Hub, `<repo>/snapshots/<revision>/`, they may lead to `<repo>/blobs/` as well.

        Raises:
            CheckpointError: The file is missing, no regular file, or leads out of the directory.
        """
        try:
            real = Path(os.path.realpath(path, strict=True))
            if inside is not None and not any(real.is_relative_to(place) for place in _allowed_places(inside)):
                raise CheckpointError(
                    f"{path} is a link that leaves its directory: a checkpoint may not name files elsewhere. Copy the"
                    " file into the directory"
                )
            self._check_regular(path, real.stat())
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | _NOFOLLOW)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise CheckpointError(f"cannot open {str(path)!r}: {error}. Check the path and its permissions") from error
        file = FileIO(descriptor, "rb")
        try:
            self._check_regular(path, os.fstat(descriptor))  # it may have been exchanged since
        except BaseException:
            file.close()
            raise
        return file

    @staticmethod
    def _check_regular(path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is no regular file: a checkpoint is made of plain files. Check the path")


def _allowed_places(directory: Path) -> list[Path]:
    real = Path(os.path.realpath(directory))
    if "snapshots" not in real.parts:
        return [real]
    last = len(real.parts) - 1 - real.parts[::-1].index("snapshots")
    return [real, Path(*real.parts[:last]) / "blobs"]
