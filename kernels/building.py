"""Compiles a kernel with ninja and the machine's C++ compiler. Needs no torch: setup.py builds ahead with it."""

from __future__ import annotations

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

from booster.kernels.sources import COMPILE_FLAGS, SOURCE_FOLDER, KernelSource, instruction_sets

__all__ = ["BuildError", "Toolchain", "build", "find_toolchain", "obstacle"]

TIMEOUT_SECONDS = 600
_SHOWN_LINES = 12  # of a compiler's output
_MAX_LINE = 300


class BuildError(Exception):
    """A kernel can't be compiled here; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The programs that compile.

    Attributes:
        compiler: Path of the C++ compiler.
        version: Its own words about itself.
        pybind11_version: Version of the headers that a module is made with.
        ninja: Path of ninja.
        include_folders: Where Python's and pybind11's headers are.
    """

    compiler: str
    version: str
    pybind11_version: str
    ninja: str
    include_folders: tuple[str, ...]

    @property
    def identity(self) -> tuple[str, ...]:
        """What a module's machine code depends on; where the programs' helpers lie it does not."""
        return self.compiler, self.version, self.pybind11_version


def obstacle(source: KernelSource) -> str | None:
    """Returns why a kernel can't be compiled on this machine; None if it can be tried."""
    try:
        find_toolchain()
    except BuildError as error:
        return str(error)
    if source.needs_linux and sys.platform != "linux":
        return f"it uses system calls of Linux, and this is {platform.system()}"
    return None


@cache
def find_toolchain() -> Toolchain:
    """Returns what kernels are compiled with.

    Raises:
        BuildError: Something is missing.
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
    """Compiles a kernel in a folder that exists, and returns the module's path there.

    Raises:
        BuildError: With the end of the compiler's output, or what is missing.
    """
    reason = obstacle(source)
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
        raise BuildError(f"{toolchain.compiler} failed:\n{_end_of(done.stdout + done.stderr)}")
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
    """Tells a kernel's plain sources which instruction sets its vector sources were compiled for."""
    return tuple(f"-DBOOSTER_HAS_{one.name.upper()}" for one in instruction_sets())


def _platform_link_flags() -> str:
    return "-undefined dynamic_lookup" if sys.platform == "darwin" else ""


def _escaped(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _quoted(path: str) -> str:
    """Returns a path as the shell that ninja starts takes it as one word."""
    return "'" + path.replace("'", "'\\''").replace("$", "$$") + "'"


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for command in (wanted,) if wanted else ("c++", "g++", "clang++"):
        path = shutil.which(command)
        if path is not None:
            return path
    if wanted:
        raise BuildError(f"CXX={wanted!r} names no program: set it to a C++ compiler, or unset it")
    raise BuildError("no C++ compiler was found: install g++ (Debian, Ubuntu: apt install g++), or set CXX")


def _version_of(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} can't be run: {error}") from error
    if done.returncode != 0:
        first = (done.stdout + done.stderr).strip().partition("\n")[0][:_MAX_LINE]
        raise BuildError(f"{compiler} --version ends with {done.returncode}: {first or 'it says nothing'}")
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
    """Returns the folder of its headers, and its version."""
    if importlib.util.find_spec("pybind11") is None:
        raise BuildError("pybind11 was not found: pip install pybind11")
    import pybind11

    return str(pybind11.get_include()), str(pybind11.__version__)


def _end_of(output: str) -> str:
    """Returns the lines that say what is wrong, or the last ones."""
    lines = [line[:_MAX_LINE] for line in output.strip().splitlines()]
    errors = [index for index, line in enumerate(lines) if "error" in line.lower()]
    start = errors[0] if errors else max(0, len(lines) - _SHOWN_LINES)
    return "\n".join(lines[start : start + _SHOWN_LINES])
