"""The folder where compiled kernels are kept: one build however many processes ask, and never half a file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from booster.kernels.building import BuildError, Toolchain, build
from booster.kernels.sources import KernelSource

__all__ = ["BuildCache", "default_folder"]

FOLDER_VARIABLE = "BOOSTER_KERNEL_CACHE"
WAIT_SECONDS = 900.0
_PAUSE_SECONDS = 0.05
_SECONDS_UNTIL_WORD = 3.0

# Note [One build]
# Who finds no compiled kernel takes the lock of its key (flock: the system takes it back from a process that dies),
# looks again, compiles in a folder of its own, and moves the finished file to its name in one step. So any number of
# ranks that start at once make one build, a build that is killed leaves nothing that another would load, and what it
# left behind is removed by the next one, which has the lock. A failed build is noted, so that those who waited for it
# do not each fail at the same thing in turn; a process that comes later tries again.


def default_folder() -> Path:
    """Returns where compiled kernels go: $BOOSTER_KERNEL_CACHE, else a folder in the user's cache."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base else Path.home() / ".cache"
    return home.absolute() / "torch-booster" / "kernels"


class BuildCache:
    """Compiled kernels in one folder.

    Args:
        folder: Made if it is not there, for this user alone. Where it can't be made, a folder of this user's among the
            temporary files takes its place.

    Raises:
        BuildError: The folder belongs to, or can be written by, someone else, who could have this process run anything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _private_folder(folder)

    def path_of(self, source: KernelSource, toolchain: Toolchain) -> Path:
        """Returns where the compiled kernel is or will be."""
        return self.folder / f"{source.name}-{_key(source, toolchain)}" / source.file_name

    def get(self, source: KernelSource, toolchain: Toolchain, announce: Callable[[str], None]) -> Path:
        """Returns the path of a compiled kernel, which is built first if it is not there.

        Args:
            source: The kernel.
            toolchain: What to build it with.
            announce: Takes a line about what takes so long.

        Raises:
            BuildError: It can't be compiled, or another process does not end with it.
        """
        path = self.path_of(source, toolchain)
        if path.is_file():
            return path
        started = time.time()
        with self._lock(path.parent.name, source, announce):
            if path.is_file():
                return path
            failure = path.parent.with_suffix(".failed")
            if failure.is_file() and failure.stat().st_mtime >= started:
                raise BuildError(failure.read_text())
            return self._build(source, toolchain, path, failure, announce)

    def _build(
        self, source: KernelSource, toolchain: Toolchain, path: Path, failure: Path, announce: Callable[[str], None]
    ) -> Path:
        name = path.parent.name
        for stale in self.folder.glob(f"{name}.building-*"):
            shutil.rmtree(stale)
        announce(
            f"building the kernel {source.name!r} with {toolchain.version}, once for this machine: about"
            f" {_expected_seconds(source)} s (kept in {self.folder})"
        )
        started = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f"{name}.building-", dir=self.folder))
        try:
            built = build(source, work)
            _sync(built)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            built.replace(path)
        except BuildError as error:
            failure.write_text(str(error))
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        announce(f"built the kernel {source.name!r} in {time.monotonic() - started:.1f} s")
        return path

    @contextmanager
    def _lock(self, name: str, source: KernelSource, announce: Callable[[str], None]) -> Iterator[None]:
        descriptor = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _acquire(descriptor, source, announce)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _acquire(descriptor: int, source: KernelSource, announce: Callable[[str], None]) -> None:
    """Waits for the lock, and says so if it takes long; not in one blocking call, which nothing could interrupt."""
    started, has_said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - started
        owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        if waited > WAIT_SECONDS:
            raise BuildError(
                f"process {owner} has been building the kernel {source.name!r} for {waited:.0f} s: end it if it hangs"
            )
        if waited > _SECONDS_UNTIL_WORD and not has_said:
            announce(f"waiting for process {owner}, which builds the kernel {source.name!r}")
            has_said = True
        time.sleep(_PAUSE_SECONDS)


def _key(source: KernelSource, toolchain: Toolchain) -> str:
    """Returns what two builds have in common exactly if one can stand for the other."""
    machine = (platform.machine(), _cpu_features())
    facts = (source.source_hash(), toolchain.identity, torch.__version__, source.file_name, machine)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _expected_seconds(source: KernelSource) -> int:
    return 20 if source.vector_sources else 8


def _private_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:  # no home, or one that can't be written
        is_usable = False
    if not is_usable and os.environ.get(FOLDER_VARIABLE):
        raise BuildError(f"{FOLDER_VARIABLE}={folder} can't be made or written to: set it to a folder of your own")
    if not is_usable:
        folder = Path(tempfile.gettempdir()).absolute() / f"torch-booster-kernels-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.stat(follow_symlinks=False)
    if stat.S_ISLNK(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{folder} is a link, or others than this user may write to it, and code is loaded from there: make it"
            f" private (chmod 700), or set {FOLDER_VARIABLE} to a folder of your own"
        )
    return folder


def _sync(path: Path) -> None:
    """Has the file on the disk before it gets its name: after a power cut it would be there, and empty."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
