"""JIT build and loading of the C++ kernels, with ninja and the machine's C++ compiler.

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
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch

from booster.errors import ConfigError
from booster.logger import get_dist_logger

SOURCE_FOLDER = Path(__file__).parent / "csrc"

# Note [Instruction sets]
# A vector source is compiled once per instruction set, into a namespace of that name, and the kernel dispatches at run
# time by CPU features. So a wheel, or a cache shared by several machines, runs on all of them. Such a file must not use
# inline functions of shared headers outside of its namespace: the linker keeps one copy of each inline function, and a
# copy compiled for newer processors would raise an illegal instruction on older ones.


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Target of vector sources: namespace and compiler flags."""

    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """Sources of a kernel, which are compiled to one Python extension module.

    Attributes:
        name: Name of the kernel; its module is `<name>_native`.
        purpose: Description for listings.
        sources: Files in `csrc/` that are compiled once, for the baseline instruction set.
        vector_sources: Files in `csrc/` that are compiled for every instruction set; see Note [Instruction sets].
        needs_linux: If True, the kernel uses Linux system calls.
    """

    name: str
    purpose: str
    sources: tuple[str, ...]
    vector_sources: tuple[str, ...] = ()
    needs_linux: bool = False

    @property
    def module_name(self) -> str:
        """Name of the extension module."""
        return f"{self.name}_native"

    @property
    def file_name(self) -> str:
        """File name of the compiled module, with the Python ABI tag."""
        return f"{self.module_name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    def source_hash(self) -> str:
        """Return a hash of all sources and compiler flags."""
        digest = hashlib.sha256()
        files = [SOURCE_FOLDER / name for name in (*self.sources, *self.vector_sources)]
        for path in [*files, *sorted(SOURCE_FOLDER.glob("*.h"))]:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        digest.update(repr((COMPILE_FLAGS, instruction_sets())).encode())
        return digest.hexdigest()


COMPILE_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    # No implicit fused multiply-add, so that results are bitwise equal on all instruction sets.
    *("-ffp-contract=off", "-fno-math-errno"),
)

_X86 = (
    InstructionSet("baseline", ()),
    InstructionSet("avx2", ("-mavx2", "-mfma", "-mf16c")),
    InstructionSet("avx512", ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c")),
)
_ARM = (InstructionSet("neon", ()),)
_OTHER = (InstructionSet("baseline", ()),)

KERNELS = {
    source.name: source
    for source in (
        KernelSource(
            name="adam",
            purpose="Adam in one pass over weights, gradients and moments",
            sources=("adam.cpp",),
            vector_sources=("adam_vector.cpp",),
        ),
        KernelSource(
            name="flat_buffers",
            purpose="norms, packing and unpacking of many tensors in one pass",
            sources=("flat_buffers.cpp",),
            vector_sources=("flat_buffers_vector.cpp",),
        ),
        KernelSource(name="checksum", purpose="CRC-32 of checkpoints", sources=("checksum.cpp",)),
        KernelSource(
            name="disk_io", purpose="asynchronous reads and writes", sources=("disk_io.cpp",), needs_linux=True
        ),
        KernelSource(
            name="shm_collectives",
            purpose="collectives of ranks on one host through shared memory",
            sources=("shm_collectives.cpp",),
            vector_sources=("shm_vector.cpp",),
            needs_linux=True,
        ),
    )
}


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that vector sources are compiled for on this architecture, baseline first."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return _X86
    return _ARM if machine in ("aarch64", "arm64") else _OTHER


TIMEOUT_SECONDS = 600
_SHOWN_LINES = 12  # of the compiler's output, in messages
_MAX_LINE = 300


class BuildError(Exception):
    """A kernel can't be compiled on this machine; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Programs and headers of a build.

    Attributes:
        compiler: Path of the C++ compiler.
        version: First line of the compiler's `--version`.
        pybind11_version: Version of the pybind11 headers.
        ninja: Path of ninja.
        include_folders: Directories of Python's and pybind11's headers.
    """

    compiler: str
    version: str
    pybind11_version: str
    ninja: str
    include_folders: tuple[str, ...]

    @property
    def identity(self) -> tuple[str, ...]:
        """Properties that a module's machine code depends on; paths of ninja and of headers are not among them."""
        return self.compiler, self.version, self.pybind11_version


def missing_requirement(source: KernelSource) -> str | None:
    """Return why a kernel can't be compiled on this machine, or None if nothing is known to be missing."""
    try:
        find_toolchain()
    except BuildError as error:
        return str(error)
    if source.needs_linux and sys.platform != "linux":
        return f"it needs Linux system calls, and this is {platform.system()}"
    return None


@cache
def find_toolchain() -> Toolchain:
    """Return the toolchain of kernels.

    Raises:
        BuildError: A program or header is missing.
    """
    compiler = _find_compiler()
    pybind11_headers, pybind11_version = _find_pybind11()
    return Toolchain(
        compiler=compiler,
        version=_version_of(compiler),
        pybind11_version=pybind11_version,
        ninja=_find_ninja(),
        include_folders=(_python_headers(), pybind11_headers),
    )


def build(source: KernelSource, folder: Path) -> Path:
    """Compile a kernel in an existing directory, and return the module's path.

    Raises:
        BuildError: The compiler failed (the message has the end of its output), or a program or header is missing.
    """
    reason = missing_requirement(source)
    if reason is not None:
        raise BuildError(reason)
    toolchain = find_toolchain()
    (folder / "build.ninja").write_text(_ninja_text(source, toolchain))
    command = [toolchain.ninja, "-C", str(folder), "-f", "build.ninja"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler did not finish in {TIMEOUT_SECONDS} s: {toolchain.compiler}") from error
    if done.returncode != 0:
        raise BuildError(f"{toolchain.compiler} failed:\n{_error_lines(done.stdout + done.stderr)}")
    return folder / source.file_name


def _ninja_text(source: KernelSource, toolchain: Toolchain) -> str:
    include = " ".join(f"-isystem {_quoted(folder)}" for folder in toolchain.include_folders)
    lines = [
        "ninja_required_version = 1.5",
        f"flags = {' '.join(COMPILE_FLAGS)} -I {_quoted(str(SOURCE_FOLDER))} {include}",
        "rule compile",
        f"  command = {_quoted(toolchain.compiler)} $flags $more -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {_quoted(toolchain.compiler)} -shared {_platform_link_flags()} -pthread $in -o $out",
    ]
    objects = []
    for name in source.sources:
        objects.append(_add_object(lines, name, Path(name).stem, _dispatch_flags()))
    for name in source.vector_sources:
        for one in instruction_sets():
            defines = (f"-DBOOSTER_ISA={one.name}", f"-DBOOSTER_ISA_{one.name.upper()}")
            objects.append(_add_object(lines, name, f"{Path(name).stem}_{one.name}", (*one.flags, *defines)))
    lines.append(f"build {_escaped(source.file_name)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _add_object(lines: list[str], source: str, stem: str, flags: tuple[str, ...]) -> str:
    lines.append(f"build {stem}.o: compile {_escaped(str(SOURCE_FOLDER / source))}")
    lines.append(f"  more = {' '.join(flags)}")
    return f"{stem}.o"


def _dispatch_flags() -> tuple[str, ...]:
    """Return the defines by which plain sources dispatch to the compiled instruction sets."""
    return tuple(f"-DBOOSTER_HAS_{one.name.upper()}" for one in instruction_sets())


def _platform_link_flags() -> str:
    return "-undefined dynamic_lookup" if sys.platform == "darwin" else ""


def _escaped(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _quoted(path: str) -> str:
    """Quote a path for ninja and the shell."""
    return "'" + path.replace("'", "'\\''").replace("$", "$$") + "'"


def _find_compiler() -> str:
    requested = os.environ.get("CXX")
    for command in (requested,) if requested else ("c++", "g++", "clang++"):
        path = shutil.which(command)
        if path is not None:
            return path
    if requested:
        raise BuildError(f"CXX={requested!r} was not found: set it to a C++ compiler, or unset it")
    raise BuildError("no C++ compiler was found: install g++ (Debian, Ubuntu: apt install g++), or set CXX")


def _version_of(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} can't be run: {error}") from error
    if done.returncode != 0:
        first = (done.stdout + done.stderr).strip().partition("\n")[0][:_MAX_LINE]
        raise BuildError(f"{compiler} --version exited with code {done.returncode}: {first or 'no output'}")
    return done.stdout.partition("\n")[0].strip()


def _find_ninja() -> str:
    found = importlib.util.find_spec("ninja")
    if found is not None:
        import ninja

        path = shutil.which("ninja", path=ninja.BIN_DIR)
        if path is not None:
            return path
    path = shutil.which("ninja")
    if path is None:
        raise BuildError("ninja was not found: pip install ninja")
    return path


def _python_headers() -> str:
    folder = sysconfig.get_paths()["include"]
    if not (Path(folder) / "Python.h").is_file():
        raise BuildError(
            f"Python's headers are not installed ({folder}/Python.h): install them (Debian, Ubuntu: apt install"
            f" python{sys.version_info.major}.{sys.version_info.minor}-dev)"
        )
    return folder


def _find_pybind11() -> tuple[str, str]:
    """Return the directory of the headers, and the version."""
    if importlib.util.find_spec("pybind11") is None:
        raise BuildError("pybind11 was not found: pip install pybind11")
    import pybind11

    return str(pybind11.get_include()), str(pybind11.__version__)


def _error_lines(output: str) -> str:
    """Return the lines from the first error on, or the last lines."""
    lines = [line[:_MAX_LINE] for line in output.strip().splitlines()]
    errors = [index for index, line in enumerate(lines) if "error" in line.lower()]
    start = errors[0] if errors else max(0, len(lines) - _SHOWN_LINES)
    return "\n".join(lines[start : start + _SHOWN_LINES])


CACHE_VARIABLE = "BOOSTER_KERNEL_CACHE"
WAIT_SECONDS = 900.0
_POLL_SECONDS = 0.05
_SECONDS_UNTIL_LOG = 3.0


def default_folder() -> Path:
    """Return the directory of compiled kernels: $BOOSTER_KERNEL_CACHE, or one in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base else Path.home() / ".cache"
    return home.absolute() / "torch-booster" / "kernels"


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


def _expected_seconds(source: KernelSource) -> int:
    return 20 if source.vector_sources else 8


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


def _sync(path: Path) -> None:
    """Flush the file before it is renamed; after a power loss it might exist under its final name, but empty."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


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
        name: Key of `booster.kernels.build.KERNELS`.

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
        return _LoadResult(_import_module(source, _prebuilt(source) or _build(source)), None)
    except (BuildError, ImportError, OSError) as error:
        reason = str(error)
    if warns:
        get_dist_logger().warning(
            f"the kernel {source.name!r} ({source.purpose}) runs in plain torch, with the same results but slower:"
            f" {reason}"
        )
    return _LoadResult(None, reason)


def _build(source: KernelSource) -> Path:
    reason = missing_requirement(source)
    if reason is not None:
        raise BuildError(reason)
    return BuildCache(default_folder()).get(source, find_toolchain(), get_dist_logger().info)


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
