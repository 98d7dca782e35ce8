"""Where optimizer states on disk are: the user's arguments, and a scratch directory that is removed at exit."""

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
from dataclasses import dataclass
from pathlib import Path

import psutil

from booster.errors import ConfigError
from booster.logger import get_dist_logger
from booster.validation import is_non_nan_number

# A killed process can't remove its directory, so the next process that offloads to the same parent does. The name is
# `booster-states-<host>-<process id>-<start of the process>-<random>`. A directory is removed only if it belongs to
# this user, comes from this host (and this container, as process ids are local to it), and its process has ended: no
# process has that id and start time.
_NAME = re.compile(r"booster-states-(?P<host>[0-9a-f]{8})-(?P<process>\d+)-(?P<start>\d+)-\w+")
_IN_MEMORY = ("tmpfs", "ramfs")
_START_TIME_TOLERANCE_SECONDS = 60  # tolerance for clock changes: start times this close are of the same process


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The arguments `nvme_offload_fraction` and `nvme_offload_dir`, checked.

    Attributes:
        fraction: Fraction of the states' bytes on disk, from 0 to 1.
        directory: Parent directory of the state files; optional, defaults to the system's temporary directory.
    """

    fraction: float = 0.0
    directory: str | None = None

    @classmethod
    def from_arguments(cls, fraction: float, directory: str | os.PathLike[str] | None) -> OffloadSettings:
        """Return the settings; a missing directory is created.

        Raises:
            ConfigError: The fraction is not a number in [0, 1], or the directory is not writable.
        """
        if not is_non_nan_number(fraction) or not 0.0 <= fraction <= 1.0:
            raise ConfigError(
                f"nvme_offload_fraction={fraction!r} is not a fraction: give a number from 0 (all optimizer states in"
                " memory) to 1 (all on disk)"
            )
        if directory is not None and (not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory)):
            raise ConfigError(
                f"nvme_offload_dir={directory!r} is not a path: give a directory, or None for a temporary one"
            )
        if directory is not None and fraction == 0:
            raise ConfigError(
                f"nvme_offload_dir={str(directory)!r} with nvme_offload_fraction=0 would stay empty: give the fraction"
                " of the optimizer states to offload, up to 1, or omit the directory"
            )
        path = None if directory is None else os.path.abspath(os.fspath(directory))
        if fraction > 0 and path is not None:
            _create_directory(path)
        return cls(float(fraction), path)


class ScratchDirectory:
    """Directory that is removed with its contents when the object is dropped or the process ends.

    Args:
        parent: Parent directory, or None for the system's temporary directory.
        contents: Description of the contents, for messages.
        setting: Name of the user's argument for the parent directory, for messages.

    Attributes:
        path: Path of the directory.

    Raises:
        OSError: The directory can't be created.
    """

    def __init__(
        self, parent: str | None, *, contents: str = "optimizer states", setting: str = "nvme_offload_dir"
    ) -> None:
        parent_path = tempfile.gettempdir() if parent is None else parent
        _remove_stale(Path(parent_path))
        process = psutil.Process()
        prefix = f"booster-states-{_host()}-{process.pid}-{int(process.create_time())}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent_path))
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())
        # Processes of `multiprocessing` skip atexit handlers, but run these finalizers.
        multiprocessing.util.Finalize(None, self._finalizer, exitpriority=10)
        if _file_system(self.path) in _IN_MEMORY:
            get_dist_logger().warning(
                f"{contents} go to files in {self.path}, which is on an in-memory file system: give a directory on a"
                f" disk as {setting}"
            )

    def remove(self) -> None:
        """Remove the directory. Idempotent."""
        self._finalizer()


def _create_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"nvme_offload_dir={path!r} can't be created: {error}. Give an existing directory on a local disk, or a"
            " path that can be created"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme_offload_dir={path!r} is not writable: give a directory with write permission")


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process drops its copy of this object too
        shutil.rmtree(path, ignore_errors=True)  # some files may be gone already


def _file_system(path: Path) -> str:
    """Return the type of the file system that contains `path`, or "" if it is unknown."""
    real = Path(os.path.realpath(path))
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    return str(max(mounts, key=lambda mount: len(mount.mountpoint)).fstype) if mounts else ""


def _host() -> str:
    name = socket.gethostname()
    with suppress(OSError):  # without /proc there are no pid namespaces
        name = f"{name} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _remove_stale(parent: Path) -> None:
    host = _host()
    for entry in parent.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is None or match["host"] != host:
            continue
        if _is_stale(entry, int(match["process"]), int(match["start"])):
            get_dist_logger().info(f"removing {entry}: stale files of an ended process")
            shutil.rmtree(entry, ignore_errors=True)  # another starting process may remove it at the same time


def _is_stale(path: Path, process: int, start: int) -> bool:
    """Return whether a path is a directory of this user whose process has ended."""
    try:
        status = path.lstat()
    except FileNotFoundError:  # removed by another process
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    try:
        return bool(abs(psutil.Process(process).create_time() - start) > _START_TIME_TOLERANCE_SECONDS)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:  # it exists, but access is denied
        return False
