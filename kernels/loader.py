"""JIT build, cache, loading and status of the C++ kernels.

A kernel is built on first use, or by setup.py at installation. Where it can't be built, plain torch is used, with one
warning.

`BOOSTER_KERNELS` selects the mode: `auto` (default: compiled where possible), `native` (compiled, or an error with the
reason) or `reference` (plain torch, nothing is built). `BOOSTER_KERNEL_CACHE` is the directory of compiled kernels.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from booster.errors import ConfigError
from booster.logger import get_dist_logger

from .build import KERNELS, BuildError, KernelSource, Toolchain, build, find_toolchain, missing_requirement

CACHE_VARIABLE = "BOOSTER_KERNEL_CACHE"
WAIT_SECONDS = 900.0
_POLL_SECONDS = 0.05
_SECONDS_UNTIL_LOG = 3.0


def cache_folder(variable: str, name: str) -> Path:
    """Return the directory in an environment variable, or else one of this name in the user's cache."""
    chosen = os.environ.get(variable)
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base else Path.home() / ".cache"
    return home.absolute() / "torch-booster" / name


def default_folder() -> Path:
    """Return the directory of compiled kernels: $BOOSTER_KERNEL_CACHE, or one in the user's cache."""
    return cache_folder(CACHE_VARIABLE, "kernels")


class BuildCache:
    """Cache of compiled kernels in one directory, safe for concurrent processes.

    A process that finds no compiled kernel takes the flock of its key (the system releases it if the process dies),
    checks again, compiles in a temporary directory, and renames the result. So any number of ranks that start at once
    make one build. A killed build leaves nothing loadable; the next build removes its files. A failed build is
    recorded, so that processes that waited for it fail at once instead of repeating it; later processes try again.

    Args:
        folder: Directory, created with mode 0700 if it is missing. If it can't be created, a directory of this user
            in the system's temporary directory is used.

    Raises:
        BuildError: The directory belongs to another user or is writable by others, who could make this process run
            arbitrary code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _private_folder(folder)

    def path_of(self, source: KernelSource, toolchain: Toolchain) -> Path:
        """Return the path of the compiled kernel, which may not exist yet."""
        return self.folder / f"{source.name}-{_key(source, toolchain)}" / source.file_name

    def get(self, source: KernelSource, toolchain: Toolchain, log: Callable[[str], None]) -> Path:
        """Return the path of a compiled kernel, and build it if it is missing.

        Args:
            source: Sources of the kernel.
            toolchain: Toolchain of the build.
            log: Function that logs a progress line.

        Raises:
            BuildError: The kernel can't be compiled, or another process did not finish building it in time.
        """
        path = self.path_of(source, toolchain)
        if path.is_file():
            return path
        started = time.time()
        with self._lock(path.parent.name, source, log):
            if path.is_file():
                return path
            failure = path.parent.with_suffix(".failed")
            if failure.is_file() and failure.stat().st_mtime >= started:
                raise BuildError(failure.read_text())
            return self._build(source, toolchain, path, failure, log)

    def _build(
        self, source: KernelSource, toolchain: Toolchain, path: Path, failure: Path, log: Callable[[str], None]
    ) -> Path:
        name = path.parent.name
        for stale in self.folder.glob(f"{name}.building-*"):
            shutil.rmtree(stale)
        log(
            f"building the kernel {source.name!r} with {toolchain.version}, once for this machine: about"
            f" {20 if source.vector_sources else 8} s (kept in {self.folder})"
        )
        started = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f"{name}.building-", dir=self.folder))
        try:
            built = build(source, work)
            with built.open("rb") as file:  # after a power loss it might exist under its final name, but empty
                os.fsync(file.fileno())
            path.parent.mkdir(mode=0o700, exist_ok=True)
            built.replace(path)
        except BuildError as error:
            failure.write_text(str(error))
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        log(f"built the kernel {source.name!r} in {time.monotonic() - started:.1f} s")
        return path

    @contextmanager
    def _lock(self, name: str, source: KernelSource, log: Callable[[str], None]) -> Iterator[None]:
        descriptor = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _acquire(descriptor, source, log)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _acquire(descriptor: int, source: KernelSource, log: Callable[[str], None]) -> None:
    """Take the lock; polls, as a blocking flock could not be interrupted."""
    started, has_logged = time.monotonic(), False
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
        if waited > _SECONDS_UNTIL_LOG and not has_logged:
            log(f"waiting for process {owner}, which builds the kernel {source.name!r}")
            has_logged = True
        time.sleep(_POLL_SECONDS)


def _key(source: KernelSource, toolchain: Toolchain) -> str:
    """Return a key that is equal exactly for interchangeable builds."""
    machine = (platform.machine(), _cpu_features())
    build_inputs = (source.source_hash(), toolchain.identity, torch.__version__, source.file_name, machine)
    return hashlib.sha256(repr(build_inputs).encode()).hexdigest()[:20]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _private_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:  # no home directory, or a read-only one
        is_usable = False
    if not is_usable and os.environ.get(CACHE_VARIABLE):
        raise BuildError(
            f"{CACHE_VARIABLE}={folder} can't be created or is not writable: set it to a private directory"
        )
    if not is_usable:
        folder = Path(tempfile.gettempdir()).absolute() / f"torch-booster-kernels-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{folder} is a link or is writable by other users, and code is loaded from it: make it private (chmod"
            f" 700), or set {CACHE_VARIABLE} to a private directory"
        )
    return folder


MODE_VARIABLE = "BOOSTER_KERNELS"
_MODES = ("auto", "native", "reference")
# Written by `BOOSTER_BUILD_KERNELS=1 pip install`; see setup.py.
PREBUILT_FOLDER = Path(__file__).parent / "prebuilt"
PREBUILT_RECORD = "source_hashes.json"


@dataclass(frozen=True, slots=True)
class _LoadResult:
    """Result of loading: the module, or the reason why it is missing."""

    module: ModuleType | None
    reason: str | None


_load_results: dict[str, _LoadResult] = {}
_lock = threading.Lock()


def kernel_mode() -> str:
    """Return the mode in `BOOSTER_KERNELS`: "auto", "native" or "reference".

    Raises:
        ConfigError: The value is unknown.
    """
    mode = os.environ.get(MODE_VARIABLE) or "auto"
    if mode not in _MODES:
        raise ConfigError(f"{MODE_VARIABLE}={mode!r} is unknown: set it to one of {', '.join(_MODES)}, or unset it")
    return mode


def load_kernel(name: str) -> ModuleType | None:
    """Return a compiled kernel's module, or None if its reference in plain torch is to be used.

    The first call on a machine builds it, which takes some seconds and is logged. The first call of a process loads it,
    later calls are a dictionary lookup. A kernel that is not available is warned about once.

    Args:
        name: Key of `KERNELS`.

    Raises:
        ConfigError: `BOOSTER_KERNELS` is `native` and the kernel can't be built, or its value is unknown.
    """
    mode = kernel_mode()
    if mode == "reference":
        return None
    result = _load_results.get(name)
    if result is None:
        with _lock:
            result = _load_results.get(name) or _load(KERNELS[name], warns=mode == "auto")
            _load_results[name] = result
    if result.module is None and mode == "native":
        raise ConfigError(
            f"{MODE_VARIABLE}=native requires the compiled kernel {name!r}, which is not available: {result.reason}."
            f" Fix that, or unset {MODE_VARIABLE} to use plain torch"
        )
    return result.module


def find_built(source: KernelSource) -> Path | None:
    """Return the path of an already compiled kernel, or None if the first use would build it."""
    prebuilt = _prebuilt(source)
    if prebuilt is not None:
        return prebuilt
    try:
        path = BuildCache(default_folder()).path_of(source, find_toolchain())
    except (BuildError, OSError):
        return None
    return path if path.is_file() else None


def _load(source: KernelSource, *, warns: bool) -> _LoadResult:
    try:
        path = _prebuilt(source)
        if path is None:
            missing = missing_requirement(source)
            if missing is not None:
                raise BuildError(missing)
            path = BuildCache(default_folder()).get(source, find_toolchain(), get_dist_logger().info)
        return _LoadResult(_import_module(source, path), None)
    except (BuildError, ImportError, OSError) as error:
        reason = str(error)
    if warns:
        get_dist_logger().warning(
            f"the kernel {source.name!r} ({source.purpose}) runs in plain torch, with the same results but slower:"
            f" {reason}"
        )
    return _LoadResult(None, reason)


def _prebuilt(source: KernelSource) -> Path | None:
    """Return the module built at installation, or None if it is missing or its sources have changed since."""
    path, record = PREBUILT_FOLDER / source.file_name, PREBUILT_FOLDER / PREBUILT_RECORD
    if not path.is_file() or not record.is_file():
        return None
    return path if json.loads(record.read_text()).get(source.name) == source.source_hash() else None


def _import_module(source: KernelSource, path: Path) -> ModuleType:
    loader = ExtensionFileLoader(source.module_name, str(path))
    spec = importlib.util.spec_from_file_location(source.module_name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not an extension module of this Python")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStatus:
    """Status of one kernel in this process.

    Attributes:
        name: Name of the kernel.
        status: "native" if a compiled kernel exists, "buildable" if the first use will compile it, and "reference" if
            plain torch is used instead.
        reason: Path of the compiled kernel, compiler that would build it, or what is missing.
    """

    name: str
    status: Literal["native", "buildable", "reference"]
    reason: str


def kernel_status(device_type: str = "cpu") -> list[KernelStatus]:
    """Return the status of every kernel, compiled ones first. Builds nothing.

    Args:
        device_type: Device type that the kernels would run on: "cpu", "cuda", ...

    Raises:
        ConfigError: `BOOSTER_KERNELS` has an unknown value.
    """
    return [*map(_status_of, KERNELS.values()), _float8_matmul(device_type)]


def _status_of(source: KernelSource) -> KernelStatus:
    if kernel_mode() == "reference":
        return KernelStatus(name=source.name, status="reference", reason=f"{MODE_VARIABLE}=reference is set")
    path = find_built(source)
    if path is not None:
        return KernelStatus(name=source.name, status="native", reason=str(path))
    reason = missing_requirement(source)
    if reason is not None:
        return KernelStatus(name=source.name, status="reference", reason=reason)
    return KernelStatus(name=source.name, status="buildable", reason=f"at its first use, by {find_toolchain().version}")


def _float8_matmul(device_type: str) -> KernelStatus:
    name = "float8 matmul"
    if device_type == "cpu":
        return KernelStatus(name=name, status="reference", reason="emulated in fp32, which is faster on the CPU")
    from .float8 import GRADIENT_DTYPE, native_problem  # here: its decorators import torch's compiler

    problem = native_problem(device_type) or native_problem(device_type, GRADIENT_DTYPE)
    if problem is not None:
        return KernelStatus(name=name, status="reference", reason=f"emulated in fp32: {problem}")
    return KernelStatus(name=name, status="native", reason=f"torch's scaled matmul on {device_type}")
