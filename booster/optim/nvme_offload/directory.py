"""A directory of this process's own for files that are of no use once it has ended."""

from __future__ import annotations

import hashlib
import multiprocessing.util
import os
import re
import shutil
import socket
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import psutil

from booster.logger import get_dist_logger

# Note [Left behind]
# A process that is killed can't remove its directory; the next one that offloads to the same place does. The name says
# whose it is: `booster-states-<host>-<process id>-<start of the process>-<random>`. It is removed only if it belongs to
# this user, comes from this host (and this container: process ids mean nothing outside of it), and that process is
# gone: none has its id, or one that started at another time.
_NAME = re.compile(r"booster-states-(?P<host>[0-9a-f]{8})-(?P<process>\d+)-(?P<start>\d+)-\w+")
_IN_MEMORY = ("tmpfs", "ramfs")
_CLOCK_SECONDS = 60  # clocks are set; a process that started nearly at the same time is taken for the same


class OwnDirectory:
    """Makes the directory, and removes it with everything in it when it is dropped or the process ends.

    Args:
        parent: Where; None: in the system's directory for temporary files.
        contents: What goes there, for messages.
        setting: The name of the user's argument that says where.

    Attributes:
        path: The directory.

    Raises:
        OSError: It can't be made.
    """

    def __init__(
        self, parent: str | None, *, contents: str = "optimizer states", setting: str = "nvme_offload_dir"
    ) -> None:
        where = tempfile.gettempdir() if parent is None else parent
        _remove_left_behind(Path(where))
        own = psutil.Process()
        prefix = f"booster-states-{_host()}-{own.pid}-{int(own.create_time())}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())
        # A process of `multiprocessing` ends without what Python runs at exit, and runs this.
        multiprocessing.util.Finalize(None, self._finalizer, exitpriority=10)
        if _file_system(self.path) in _IN_MEMORY:
            get_dist_logger().warning(
                f"{contents} go to files in {self.path}, which is itself kept in memory: give a directory on a disk as"
                f" {setting}"
            )

    def remove(self) -> None:
        """Remove the directory; a second call does nothing."""
        self._finalizer()


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process drops its copy of this object too
        shutil.rmtree(path, ignore_errors=True)  # files may be gone already


def _file_system(path: Path) -> str:
    """Return the kind of file system that a directory is in; "" if that can't be found out."""
    real = Path(os.path.realpath(path))
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    return str(max(mounts, key=lambda mount: len(mount.mountpoint)).fstype) if mounts else ""


def _host() -> str:
    with suppress(OSError):  # a system without /proc has no containers of this kind
        return _digest(f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}")
    return _digest(socket.gethostname())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _remove_left_behind(parent: Path) -> None:
    host = _host()
    for entry in parent.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is None or match["host"] != host or not _is_own_directory(entry):
            continue
        if not _is_running(int(match["process"]), int(match["start"])):
            get_dist_logger().info(f"removing {entry}: files that an ended process left behind")
            shutil.rmtree(entry, ignore_errors=True)  # another process that starts now may do the same


def _is_own_directory(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:  # another process was faster
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_running(process: int, start: int) -> bool:
    try:
        return bool(abs(psutil.Process(process).create_time() - start) <= _CLOCK_SECONDS)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # there is one, of which nothing may be seen
        return True
