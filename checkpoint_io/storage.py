"""Storage interface: all access to the file system, one overridable method per operation."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from booster.errors import CheckpointError
from booster.kernels.disk_io import reserve_space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

# Note [Freed space]
# ext4 takes 0.2 s to free the blocks of 1 GiB, within the call that removes the last name of a file, or replaces it,
# and an fsync meanwhile waits for that. So a commit opens large files before it removes them, and a thread closes them
# after it, which frees the blocks. The names are gone at once, as before; if the process ends, the system closes them.
# Only on local file systems: a client of NFS first renames a file that it has open, so that a replaced one is missing
# for a moment, and SMB may refuse. A forked process closes what it has inherited.

# Every modifying method under "Writing" is one operation: it completes or raises. Effects that do not go through a
# method of `self` are invisible to subclasses. The tests' storages record, fail and replay exactly these methods, so a
# new method must be added to them as well. No other module opens, creates, renames or removes files.

_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_CALL_BYTES = 2**30  # Linux moves 2 GiB less a page in one call, macOS 2 GiB less a byte
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_LARGE_BYTES = 16 * 2**20
_MAX_HELD = 64  # descriptors of removed files: a process often has 1,024 in all
_LOCAL_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x9123683E, 0x01021994}  # ext4, XFS, Btrfs, tmpfs, as statfs(2) has them
_held: ContextVar[list[int] | None] = ContextVar("held", default=None)  # those of the commit that runs
_all_held: set[int] = set()
_freeing = threading.Condition()
_num_freeing = 0  # commits whose removed files are not all closed
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 2**20
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


@dataclass(slots=True)
class OpenFile:
    """Open file; a context manager that closes it.

    Attributes:
        path: Path it was opened by, for messages.
        descriptor: File descriptor; -1 after `close`.
    """

    path: Path
    descriptor: int

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


class Storage:
    """Local file system. Subclasses may record operations or inject failures.

    Methods that write raise the system's `OSError`; callers add the rank and raise on all ranks. Methods that read
    raise `CheckpointError`, except for `names`, `kind` and `free_bytes`.
    """

    # Writing.

    def make_directory(self, path: Path) -> None:
        """Create a directory, with permissions according to the umask."""
        path.mkdir()

    def make_parents(self, path: Path) -> None:
        """Create and sync the missing parent directories of the path."""
        missing = [parent for parent in path.parents if not parent.is_dir()]
        for parent in reversed(missing):
            try:
                self.make_directory(parent)
            except FileExistsError:  # created by another process meanwhile
                if not parent.is_dir():
                    raise
            self.sync_path(parent.parent)

    def create(self, path: Path) -> OpenFile:
        """Create a file for writing and reading, with permissions according to the umask; do not follow links."""
        return OpenFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o666))

    def open_for_writing(self, path: Path, *, direct: bool = False) -> OpenFile:
        """Open an existing regular file without truncating it; do not follow links.

        Args:
            path: File.
            direct: If True, use O_DIRECT; memory, offset and length of every write must be multiples of 4096.

        Raises:
            OSError: The file cannot be opened; `EINVAL` if the file system does not support O_DIRECT.
            CheckpointError: The path is not a regular file.
        """
        flags = os.O_RDWR | os.O_NONBLOCK | _NOFOLLOW
        if direct:
            if not hasattr(os, "O_DIRECT"):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
            flags |= os.O_DIRECT
        return self._check_opened(OpenFile(path, os.open(path, flags)))

    def device_of(self, path: Path) -> int:
        """Return the number of the device that a file lies on."""
        return path.stat().st_dev

    def resize(self, file: OpenFile, num_bytes: int) -> None:
        """Set the size of a file and, if supported, allocate its disk space, so that a full disk is detected here."""
        with _add_path_to_errors(file.path):
            try:
                reserve_space(file.descriptor, num_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.wait_for_freed_space():
                    raise
                reserve_space(file.descriptor, num_bytes)

    def write_at(self, file: OpenFile, data: Buffer, offset: int) -> None:
        """Write all data at an offset of the file. Thread-safe."""
        rest = _bytes_of(data)
        while len(rest) > 0:
            try:
                with _add_path_to_errors(file.path):
                    count = self._pwrite(file.descriptor, rest[:_MAX_CALL_BYTES], offset)
            except InterruptedError:
                continue
            if count <= 0:
                raise OSError(errno.EIO, "the file system took none of the bytes to write", str(file.path))
            rest, offset = rest[count:], offset + count

    _pwrite = staticmethod(os.pwrite)

    def sync(self, file: OpenFile) -> None:
        """Flush the file to disk."""
        # Never retried: after a failed fsync the next one reports success although the pages are lost.
        with _add_path_to_errors(file.path):
            os.fsync(file.descriptor)

    def close(self, file: OpenFile) -> None:
        """Close a file. Idempotent."""
        file.close()

    def sync_path(self, path: Path) -> None:
        """Flush a file's content, or a directory's entries, to disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _add_path_to_errors(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_file(self, path: Path, content: bytes) -> None:
        """Create a file with this content and flush it to disk."""
        file = self.create(path)
        try:
            self.write_at(file, content, 0)
            self.sync(file)
        finally:
            self.close(file)

    def rename_new(self, source: Path, target: Path) -> None:
        """Rename a file or directory atomically; never replace an existing one.

        Raises:
            FileExistsError: The target exists, even as an empty directory.
        """
        # File systems without such a rename (NFS, some FUSE ones) get a check first, with a race: a file created by
        # another process between check and rename is replaced; a directory that is not empty makes the rename fail.
        if _renameat2 is not None:
            if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
                return
            code = ctypes.get_errno()
            if code not in _UNSUPPORTED:
                raise OSError(code, os.strerror(code), str(source), None, str(target))
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(source), None, str(target))
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file or directory atomically; an existing file is replaced."""
        _hold_if_large(target)
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or a symbolic link."""
        _hold_if_large(path)
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Remove a directory recursively; neither atomic nor in a defined order."""
        for file in path.rglob("*"):
            _hold_if_large(file)
        shutil.rmtree(path)

    @contextmanager
    def free_space_later(self) -> Iterator[None]:
        """Context in which removed files keep their space, which a thread frees after it; see Note [Freed space]."""
        global _num_freeing
        held: list[int] = []
        token = _held.set(held)
        with _freeing:
            _num_freeing += 1
        try:
            yield
        finally:
            _held.reset(token)
            try:
                threading.Thread(target=_free, args=(held,), name="booster-free-space", daemon=True).start()
            except RuntimeError:  # the interpreter is exiting
                _free(held)

    def wait_for_freed_space(self) -> bool:
        """Wait until the space of removed files is free; return whether any was not."""
        with _freeing:
            was_freeing = _num_freeing > 0
            _freeing.wait_for(lambda: _num_freeing == 0)
        return was_freeing

    def lock(self, path: Path) -> int | None:
        """Lock a file or directory until the descriptor is closed; return None if another process holds the lock."""
        descriptor = os.open(path, os.O_RDONLY | _NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            # A file system without locks: treated as acquired.
            return descriptor
        return descriptor

    def unlock(self, descriptor: int) -> None:
        """Release a lock."""
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone leaves it to processes that were forked meanwhile
        os.close(descriptor)

    # Reading.

    def names(self, directory: Path) -> list[str]:
        """List a directory, sorted."""
        return sorted(os.listdir(directory))

    def kind(self, path: Path) -> str | None:
        """Return "file", "directory", "link" or "other", or None if the path does not exist."""
        try:
            mode = os.lstat(path).st_mode
        except ValueError:  # a NUL in the name
            return None
        except OSError as error:
            if error.errno in _NOT_FOUND:
                return None
            raise
        if stat.S_ISLNK(mode):
            return "link"
        if stat.S_ISDIR(mode):
            return "directory"
        return "file" if stat.S_ISREG(mode) else "other"

    def is_foreign(self, path: Path) -> bool:
        """Return whether the path is owned by another user, in a directory with the sticky bit such as /tmp."""
        try:
            is_shared = os.stat(path.parent).st_mode & stat.S_ISVTX
            return bool(is_shared) and os.lstat(path).st_uid not in (os.geteuid(), 0)
        except FileNotFoundError:
            return False

    def free_bytes(self, path: Path) -> int:
        """Return the free space for this user on the file system of the path, which need not exist.

        File systems that report no blocks (/proc, some FUSE ones) do not count space; for these return sys.maxsize.
        """
        existing = Path(os.path.abspath(path))
        while not existing.exists():
            existing = existing.parent
        status = os.statvfs(existing)
        if status.f_blocks == 0:
            return sys.maxsize
        return status.f_bavail * status.f_frsize

    def open_regular(self, path: Path, *, inside: Path | None = None) -> OpenFile:
        """Open a regular file for reading. Other kinds are rejected: opening a pipe would block.

        Args:
            path: File.
            inside: Directory that links must not leave; in a cache of the Hugging Face Hub,
                `<repo>/snapshots/<revision>/`, links to `<repo>/blobs/` are allowed too. Optional, defaults to no
                restriction.

        Raises:
            CheckpointError: The file is missing, not a regular file, or outside of `inside`.
        """
        try:
            real = Path(os.path.realpath(path, strict=True))
            if inside is not None:
                directory = Path(os.path.realpath(inside))
                allowed = [directory]
                if "snapshots" in directory.parts:
                    last = len(directory.parts) - 1 - directory.parts[::-1].index("snapshots")
                    allowed.append(Path(*directory.parts[:last]) / "blobs")
                if not any(real.is_relative_to(each) for each in allowed):
                    raise CheckpointError(
                        f"{path} is a link that leaves its directory, which a checkpoint must not contain: copy the"
                        " file into the directory"
                    )
            if not stat.S_ISREG(real.stat().st_mode):
                raise _not_regular_error(path)
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | _NOFOLLOW)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            advice = "Check the path and its permissions"
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                advice = "A load keeps all files of a checkpoint open: raise the limit, as by ulimit -n"
            raise CheckpointError(f"cannot open {str(path)!r}: {error}. {advice}") from error
        return self._check_opened(OpenFile(path, descriptor))  # the path may have been replaced since the check

    def size(self, file: OpenFile) -> int:
        """Return the size of a file in bytes."""
        return os.fstat(file.descriptor).st_size

    def read_at(self, file: OpenFile, buffer: Buffer, offset: int) -> None:
        """Fill the buffer from an offset of the file. Thread-safe.

        Raises:
            CheckpointError: The file is truncated, or reading failed.
        """
        rest = _bytes_of(buffer)
        while len(rest) > 0:
            try:
                count = os.preadv(file.descriptor, [rest[:_MAX_CALL_BYTES]], offset)
            except OSError as error:
                raise CheckpointError(f"cannot read {file.path}: {error}. Take another copy of it") from error
            if count == 0:
                raise CheckpointError(
                    f"{file.path} ends at byte {offset}, {len(rest)} bytes too early: it is truncated, or another"
                    " process writes it. Take another copy of it"
                )
            rest, offset = rest[count:], offset + count

    def is_cached(self, file: OpenFile) -> bool:
        """Return whether most of a file is in the page cache, from samples; True if the system does not tell.

        Linux tells it to the owner of a file, and to users that may write to it.
        """
        size = self.size(file)
        # Spread evenly; a small file is sampled completely.
        starts = {size * index // _NUM_SAMPLES // mmap.ALLOCATIONGRANULARITY for index in range(_NUM_SAMPLES)}
        num_cached = num_pages = 0
        for start in sorted(starts):
            offset = start * mmap.ALLOCATIONGRANULARITY
            states = _page_states(file.descriptor, offset, min(_SAMPLE_BYTES, size - offset))
            if states is None:
                return True
            num_cached += int((states & 1).sum())
            num_pages += len(states)
        return 2 * num_cached >= num_pages

    def open_direct(self, file: OpenFile) -> OpenFile | None:
        """Open the file again, for reads past the page cache; return None if the file system has no O_DIRECT."""
        try:
            # By descriptor, because the path may by now refer to another file.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
            return OpenFile(file.path, os.open(f"/proc/self/fd/{file.descriptor}", flags))
        except (AttributeError, OSError):
            return None

    def read_file(self, path: Path, *, max_bytes: int, inside: Path | None = None) -> bytes:
        """Return the content of a regular file.

        Args:
            path: File.
            max_bytes: Maximum size; a larger file is not read.
            inside: See `open_regular`.

        Raises:
            CheckpointError: The file is larger, missing, not a regular file, or outside of `inside`.
        """
        with self.open_regular(path, inside=inside) as file:
            num_bytes = self.size(file)
            if num_bytes > max_bytes:
                raise CheckpointError(
                    f"{path} has {num_bytes} bytes, but at most {max_bytes} are allowed: it is damaged or not the kind"
                    " of file that its name implies. Take another copy of it"
                )
            content = bytearray(num_bytes)
            self.read_at(file, content, 0)
        return bytes(content)

    @staticmethod
    def _check_opened(file: OpenFile) -> OpenFile:
        try:
            if not stat.S_ISREG(os.fstat(file.descriptor).st_mode):
                raise _not_regular_error(file.path)
        except BaseException:
            file.close()
            raise
        return file


class FakeStorage(Storage):
    """Storage of a fake world: takes everything, keeps nothing, and touches no file."""

    def open_for_writing(self, path: Path, *, direct: bool = False) -> OpenFile:
        return OpenFile(path, -1)

    def write_at(self, file: OpenFile, data: Buffer, offset: int) -> None:
        """Do nothing."""

    def sync(self, file: OpenFile) -> None:
        """Do nothing."""

    def free_bytes(self, path: Path) -> int:
        return sys.maxsize


def _hold_if_large(path: Path) -> None:
    """Within `free_space_later`, open a large file that is about to be removed."""
    held = _held.get()
    if held is None or len(held) >= _MAX_HELD:
        return
    with suppress(OSError):  # not a readable file: it is removed as usual
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_size >= _LARGE_BYTES:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NOFOLLOW)
            if _file_system(descriptor) in _LOCAL_FILE_SYSTEMS:
                _all_held.add(descriptor)
                held.append(descriptor)
            else:
                os.close(descriptor)


def _free(descriptors: list[int]) -> None:
    """Close removed files, and note that the space of one commit is free."""
    global _num_freeing
    for descriptor in descriptors:
        _all_held.discard(descriptor)  # before: a process that is forked now closes no other file of this number
        os.close(descriptor)
    with _freeing:
        _num_freeing -= 1
        _freeing.notify_all()


def _close_inherited() -> None:
    """In a forked process, close removed files, whose space it would keep; it has none of the threads."""
    global _freeing, _num_freeing
    for descriptor in _all_held:
        os.close(descriptor)
    _all_held.clear()
    _freeing, _num_freeing = threading.Condition(), 0


os.register_at_fork(after_in_child=_close_inherited)


def _file_system(descriptor: int) -> int | None:
    """Return the type of the file system of an open file, as `statfs` gives it; None if the system does not tell."""
    status = (ctypes.c_long * 64)()
    if _fstatfs is None or _fstatfs(descriptor, ctypes.byref(status)) != 0:
        return None
    return status[0] & 0xFFFFFFFF


@contextmanager
def _add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the path to errors of calls that take a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _not_regular_error(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is not a regular file: a checkpoint consists of regular files. Check the path")


def _page_states(descriptor: int, offset: int, num_bytes: int) -> np.ndarray | None:
    """Return a byte for each page, of which bit 0 means that it is cached; None if the system does not tell."""
    states = np.zeros(-(-num_bytes // mmap.PAGESIZE), dtype=np.uint8)
    if num_bytes == 0:
        return states
    try:
        pages = np.frombuffer(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ, offset=offset), dtype=np.uint8)
        has_failed = _mincore is None or _mincore(pages.ctypes.data, num_bytes, states.ctypes.data)
    except (OSError, ValueError):  # ValueError: the file was truncated
        return None
    return None if has_failed else states


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast() rejects shapes with a zero


_renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # not wrapped by Python
if _renameat2 is not None:
    _renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    _renameat2.restype = ctypes.c_int
_fstatfs: Any = getattr(ctypes.CDLL(None), "fstatfs64", None)
_mincore: Any = getattr(ctypes.CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    _mincore.restype = ctypes.c_int
