"""Storage whose n-th operation fails the way disks fail: the fault is data, and the test that fails prints it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from dataclasses import dataclass

from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES")
HICCUPS = ("SHORT", "EINTR")  # what writing must bear
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong on which rank.

    Attributes:
        rank: Where.
        at: At which of that rank's operations, counted from 0; -1: never.
        error: The name of an errno; "SHORT" for a write that takes a part, "EINTR" for one that a signal interrupts.
        is_lasting: Whether everything after it fails as well, as on a disk that stays full or was taken away.
    """

    rank: int = 0
    at: int = -1
    error: str = "ENOSPC"
    is_lasting: bool = False

    @property
    def text(self) -> str:
        """What the system says."""
        return os.strerror(getattr(errno, self.error))


class FaultingStorage(Storage):
    """The file system, until the fault.

    Args:
        fault: What goes wrong.
        rank: The rank that uses this storage.
        syncs: Whether what should reach the disk does: a test of thousands of saves has no time for it.
    """

    def __init__(self, fault, rank=0, *, syncs=False):
        self.fault = fault
        self.rank = rank
        self.syncs = syncs
        self.operations = []  # the name of each
        self.faults = []  # the number and the name of each that failed
        self._lock = threading.Lock()

    def make_directory(self, path):
        self._count("make_directory", path)
        super().make_directory(path)

    def create(self, path):
        self._count("create", path)
        return super().create(path)

    def open_for_writing(self, path, *, direct=False):
        self._count("open_for_writing", path)
        return super().open_for_writing(path, direct=direct)

    def resize(self, file, num_bytes):
        self._count("resize", file.path)
        super().resize(file, num_bytes)

    def _pwrite(self, descriptor, data, offset):
        hiccup = self._count("write", None)
        if hiccup == "EINTR":
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        if hiccup == "SHORT":
            data = data[: _part(len(data), descriptor)]
        return super()._pwrite(descriptor, data, offset)

    def sync(self, file):
        self._count("sync", file.path)
        if self.syncs:
            super().sync(file)

    def sync_path(self, path):
        self._count("sync_path", path)
        if self.syncs:
            super().sync_path(path)
        else:
            os.stat(path)  # it must be there

    def rename_new(self, source, target):
        self._count("rename_new", source)
        super().rename_new(source, target)

    def replace(self, source, target):
        self._count("replace", source)
        super().replace(source, target)

    def remove(self, path):
        self._count("remove", path)
        super().remove(path)

    def remove_tree(self, path):
        self._count("remove_tree", path)
        super().remove_tree(path)

    def _count(self, name, path):
        """Raises if this is the operation that fails; returns the hiccup if it is one."""
        with self._lock:
            number = len(self.operations)
            self.operations.append(name)
            fault = self.fault
            is_due = number == fault.at or (fault.is_lasting and 0 <= fault.at < number)
            if fault.rank != self.rank or not is_due:
                return None
            self.faults.append((number, name))
        if fault.error in HICCUPS:
            return fault.error
        where = () if path is None else (str(path),)  # the system names no file that it knows by a descriptor
        raise OSError(getattr(errno, fault.error), fault.text, *where)


class UnsyncedStorage(Storage):
    """The file system with a disk without delays: for tests that make thousands of saves."""

    def sync(self, file):
        pass

    def sync_path(self, path):
        os.stat(path)


class HidingStorage(UnsyncedStorage):
    """Shows what others made only after a while, as a network file system does that remembers what was not there.

    Args:
        seconds: How long a name that is new stays hidden from questions about it, and can't be opened for reading.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self.num_hidden = 0

    def names(self, directory):
        return [name for name in super().names(directory) if not self._is_hidden(directory / name)]

    def kind(self, path):
        return None if self._is_hidden(path) else super().kind(path)

    def open_regular(self, path, *, inside=None):
        if self._is_hidden(path):
            missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            raise CheckpointError(f"cannot open {path}: {missing}") from missing
        return super().open_regular(path, inside=inside)

    def _is_hidden(self, path):
        try:
            is_hidden = time.time() - os.lstat(path).st_ctime < self.seconds
        except OSError:
            return False
        self.num_hidden += is_hidden
        return is_hidden


def _part(num_bytes, descriptor):
    """Returns how much a short write takes; past the page cache that is whole blocks."""
    is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0)
    half = max(1, num_bytes // 2)
    return max(_BLOCK_BYTES, half // _BLOCK_BYTES * _BLOCK_BYTES) if is_direct else half
