"""Kernel sources and their compilation, with ninja and the machine's C++ compiler.

Imported by setup.py without torch, and by `loader.py` for just-in-time builds. `torch.utils.cpp_extension` does not
serve here (tried with torch 2.13; it takes as long): its flags are those of a whole extension, and vector sources need
their own; it links libtorch, so a wheel would fit one version of torch; and its lock outlives a builder that was
killed, for which all other ranks then wait without end.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
    if importlib.util.find_spec("pybind11") is None:
        raise BuildError("pybind11 was not found: pip install pybind11")
    import pybind11

    return Toolchain(
        compiler=compiler,
        version=_version_of(compiler),
        pybind11_version=str(pybind11.__version__),
        ninja=_find_ninja(),
        include_folders=(_python_headers(), str(pybind11.get_include())),
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
        lines = [line[:_MAX_LINE] for line in (done.stdout + done.stderr).strip().splitlines()]
        errors = [index for index, line in enumerate(lines) if "error" in line.lower()]
        start = errors[0] if errors else max(0, len(lines) - _SHOWN_LINES)
        shown = "\n".join(lines[start : start + _SHOWN_LINES])
        raise BuildError(f"{toolchain.compiler} failed:\n{shown}")
    return folder / source.file_name


def _ninja_text(source: KernelSource, toolchain: Toolchain) -> str:
    link_flags = "-undefined dynamic_lookup" if sys.platform == "darwin" else ""
    include = " ".join(f"-isystem {_quoted(folder)}" for folder in toolchain.include_folders)
    lines = [
        "ninja_required_version = 1.5",
        f"flags = {' '.join(COMPILE_FLAGS)} -I {_quoted(str(SOURCE_FOLDER))} {include}",
        "rule compile",
        f"  command = {_quoted(toolchain.compiler)} $flags $more -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {_quoted(toolchain.compiler)} -shared {link_flags} -pthread $in -o $out",
    ]
    objects = []
    # Plain sources dispatch to the compiled instruction sets by these defines.
    dispatch_flags = tuple(f"-DBOOSTER_HAS_{one.name.upper()}" for one in instruction_sets())
    for name in source.sources:
        objects.append(_add_object(lines, name, Path(name).stem, dispatch_flags))
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
