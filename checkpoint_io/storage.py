"""The storage seam: the one place that touches the file system, one overridable method for each thing done to it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

__all__ = ["OpenFile", "Storage"]

# Note [Operations]: every method under "Writing" that changes something is one operation: it is done or it raises, and
# what it does not call through `self` no subclass sees. The tests record, fail and replay exactly these; so whoever
# adds one adds it to their storages as well. Nothing outside this file opens, makes, renames or removes anything.

_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_CALL_BYTES = 2**30  # Linux moves 2 GiB less a page in one call, macOS 2 GiB less a byte
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


@dataclass(slots=True)
class OpenFile:
    """An open file; a context manager that closes it.

    Attributes:
        path: The name it was opened by, for messages.
        descriptor: What the system knows it by; -1 once it is closed.
    """

    path: Path
    descriptor: int

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


class Storage:
    """The local file system. A subclass may record what is done, or fail on purpose; see Note [Operations].

    Methods that write raise `OSError` as the system gives it: the caller knows on which rank, and tells all of them.
    Methods that read raise `CheckpointError`, except for `names`, `kind` and `free_bytes`.
    """

    # Writing.

    def make_directory(self, path: Path) -> None:
        """Make one new directory, with the modes of the process's umask."""
        path.mkdir()

    def make_parents(self, path: Path) -> None:
        """Make the directories above the path that are not there yet, on the disk as well."""
        missing = [parent for parent in path.parents if not parent.is_dir()]
        for parent in reversed(missing):
            try:
                self.make_directory(parent)
            except FileExistsError:  # another process was quicker
                if not parent.is_dir():
                    raise
            self.sync_path(parent.parent)

    def create(self, path: Path) -> OpenFile:
        """Open a new file for writing and reading, with the modes of the process's umask; never through a link."""
        return OpenFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o666))

    def open_for_writing(self, path: Path, *, direct: bool = False) -> OpenFile:
        """Open a regular file that is there, as it is; never through a link.

        Args:
            path: The file.
            direct: Whether to go past the page cache; memory, offset and length of every write are then multiples of
                4096.

        Raises:
            OSError: It can't be opened; with `EINVAL` where the file system can't go past the page cache.
            CheckpointError: It is no regular file.
        """
        flags = os.O_RDWR | os.O_NONBLOCK | _NOFOLLOW
        if direct:
            if not hasattr(os, "O_DIRECT"):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
            flags |= os.O_DIRECT
        return self._checked(OpenFile(path, os.open(path, flags)))

    def resize(self, file: OpenFile, num_bytes: int) -> None:
        """Give a file its size, and the disk space for it where the file system can: so a full disk shows up here."""
        if num_bytes > 0:
            _reserve(file, num_bytes)
        with _named(file.path):
            os.ftruncate(file.descriptor, num_bytes)

    def write_at(self, file: OpenFile, data: Buffer, offset: int) -> None:
        """Write all of the data at an offset of the file. Any number of threads may do so at once."""
        rest = _bytes_of(data)
        while len(rest) > 0:
            try:
                with _named(file.path):
                    count = self._pwrite(file.descriptor, rest[:_MAX_CALL_BYTES], offset)
            except InterruptedError:
                continue
            if count <= 0:
                raise OSError(errno.EIO, "the file system took none of the bytes to write", str(file.path))
            rest, offset = rest[count:], offset + count

    def _pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def sync(self, file: OpenFile) -> None:
        """Wait until everything written to the file is on the disk."""
        # Not once more after an error: the second call says that all is well, and the pages are lost.
        with _named(file.path):
            os.fsync(file.descriptor)

    def close(self, file: OpenFile) -> None:
        """Close a file; a second call does nothing."""
        file.close()

    def sync_path(self, path: Path) -> None:
        """Wait until a file's content, or a directory's entries, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _named(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_file(self, path: Path, content: bytes) -> None:
        """Make a new file of some bytes, and waits until they are on the disk."""
        file = self.create(path)
        try:
            self.write_at(file, content, 0)
            self.sync(file)
        finally:
            self.close(file)

    def rename_new(self, source: Path, target: Path) -> None:
        """Give a file or a directory another name, in one step, if nothing has that name.

        Raises:
            FileExistsError: Something has it, even an empty directory.
        """
        # A file system without such a rename (NFS, some FUSE ones) gets a check first, and another process may be
        # quicker between the two: then a file that it made is lost, and a directory that isn't empty makes this fail.
        if _rename_noreplace(source, target):
            return
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(source), None, str(target))
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Give a file or a directory another name, in one step; a file that had it is gone."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or a link."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and what is in it, in no certain order, and not in one step."""
        shutil.rmtree(path)

    def lock(self, path: Path) -> int | None:
        """Mark a file or directory as in use until the descriptor is closed; None where another process did so."""
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
        """End a mark."""
        os.close(descriptor)

    # Reading.

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(directory))

    def kind(self, path: Path) -> str | None:
        """Return "file", "directory", "link" or "other" for what has this name, and None where nothing has it."""
        try:
            mode = os.lstat(path).st_mode
        except ValueError:  # a NUL in the name
            return None
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise
        if stat.S_ISLNK(mode):
            return "link"
        if stat.S_ISDIR(mode):
            return "directory"
        return "file" if stat.S_ISREG(mode) else "other"

    def is_foreign(self, path: Path) -> bool:
        """Return whether another user made this name in a directory that keeps its users apart, such as /tmp."""
        try:
            is_shared = os.stat(path.parent).st_mode & stat.S_ISVTX
            return bool(is_shared) and os.lstat(path).st_uid not in (os.geteuid(), 0)
        except FileNotFoundError:
            return False

    def free_bytes(self, path: Path) -> int:
        """Return how much this user may still write to the file system that the path is on, or will be on.

        A file system that says that it has no blocks at all (/proc, some of FUSE) does not count them: then more than
        any file has.
        """
        place = Path(os.path.abspath(path))
        while not place.exists():
            place = place.parent
        status = os.statvfs(place)
        if status.f_blocks == 0:
            return sys.maxsize
        return status.f_bavail * status.f_frsize

    def open_regular(self, path: Path, *, inside: Path | None = None) -> OpenFile:
        """Open a regular file for reading, and nothing else: opening a pipe would wait for ever.

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
            _check_regular(path, real.stat())
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | _NOFOLLOW)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise CheckpointError(f"cannot open {str(path)!r}: {error}. Check the path and its permissions") from error
        return self._checked(OpenFile(path, descriptor))  # it may have been exchanged since

    def size(self, file: OpenFile) -> int:
        """Return the number of bytes of a file."""
        return os.fstat(file.descriptor).st_size

    def read_at(self, file: OpenFile, buffer: Buffer, offset: int) -> None:
        """Fill the whole buffer from an offset of the file. Any number of threads may do so at once.

        Raises:
            CheckpointError: The file ends before, or the disk gives an error.
        """
        rest = _bytes_of(buffer)
        while len(rest) > 0:
            try:
                count = os.preadv(file.descriptor, [rest[:_MAX_CALL_BYTES]], offset)
            except OSError as error:
                raise CheckpointError(f"cannot read {file.path}: {error}. Take another copy of it") from error
            if count == 0:
                raise CheckpointError(
                    f"{file.path} ends at byte {offset}, and {len(rest)} more were to be read: it is cut, or another"
                    " process writes it. Take another copy of it"
                )
            rest, offset = rest[count:], offset + count

    def read_file(self, path: Path, *, max_bytes: int, inside: Path | None = None) -> bytes:
        """Return the bytes of a regular file.

        Args:
            path: The file.
            max_bytes: How many it may have at most; a larger one is not read.
            inside: As for `open_regular`.

        Raises:
            CheckpointError: It is larger, missing, no regular file, or leads out of the directory.
        """
        with self.open_regular(path, inside=inside) as file:
            num_bytes = self.size(file)
            if num_bytes > max_bytes:
                raise CheckpointError(
                    f"{path} has {num_bytes} bytes, and {max_bytes} are allowed: it is not what its name says, or"
                    " damaged. Take another copy of it"
                )
            content = bytearray(num_bytes)
            self.read_at(file, content, 0)
        return bytes(content)

    @staticmethod
    def _checked(file: OpenFile) -> OpenFile:
        try:
            _check_regular(file.path, os.fstat(file.descriptor))
        except BaseException:
            file.close()
            raise
        return file


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the file into errors of calls that know a descriptor only."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no regular file: a checkpoint is made of plain files. Check the path")


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a shape with a zero in it can't be cast


def _allowed_places(directory: Path) -> list[Path]:
    real = Path(os.path.realpath(directory))
    if "snapshots" not in real.parts:
        return [real]
    last = len(real.parts) - 1 - real.parts[::-1].index("snapshots")
    return [real, Path(*real.parts[:last]) / "blobs"]


# Two calls that Python has no name for. `os.posix_fallocate` is none of them: where the file system can't reserve, the
# C library writes into every block instead, over the network if need be.


def _system_call(name: str, *argument_types: Any) -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes, function.restype = argument_types, ctypes.c_int
    return function


_fallocate = _system_call("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_renameat2 = _system_call("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


def _reserve(file: OpenFile, num_bytes: int) -> None:
    while _fallocate is not None and _fallocate(file.descriptor, 0, 0, num_bytes) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), str(file.path))


def _rename_noreplace(source: Path, target: Path) -> bool:
    """Rename, or returns False where this can't be done in one step."""
    if _renameat2 is None:
        return False
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
