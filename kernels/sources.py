"""Which kernels there are and what they are compiled from. Needs neither torch nor a compiler."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KERNELS", "SOURCE_FOLDER", "InstructionSet", "KernelSource", "instruction_sets"]

SOURCE_FOLDER = Path(__file__).parent / "csrc"

# Note [Instruction sets]
# A vector source is compiled once for each instruction set, into a namespace of its name, and the kernel chooses at run
# time by what the processor has: so a cache that several machines share, or a wheel, runs on all of them. Such a file
# uses nothing inline from shared headers outside of its namespace: the linker keeps one copy of each inline function,
# and if that were the one for the newest processors, older ones would end with an illegal instruction.


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What a vector source is compiled for: the namespace, and the compiler's flags."""

    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """A kernel, which becomes one Python extension module.

    Attributes:
        name: The kernel's name; its module is `<name>_native`.
        purpose: What it does, for lists.
        sources: Files in `csrc/` that are compiled once, for any processor of the machine's kind.
        vector_sources: Files there that are compiled for every instruction set; see Note [Instruction sets].
        needs_linux: It uses system calls that no other system has.
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
        """Name of the compiled module's file, which tells the Python that can import it."""
        return f"{self.module_name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    def source_hash(self) -> str:
        """Returns a hash of everything that is compiled, and of how."""
        digest = hashlib.sha256()
        files = [SOURCE_FOLDER / name for name in (*self.sources, *self.vector_sources)]
        for path in [*files, *sorted(SOURCE_FOLDER.glob("*.h"))]:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        digest.update(repr((COMPILE_FLAGS, instruction_sets())).encode())
        return digest.hexdigest()


COMPILE_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    # A product and a sum are one operation only where the source says so: else instruction sets would differ in bits.
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
    """Returns what vector sources are compiled for on this kind of machine, the plainest first."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return _X86
    return _ARM if machine in ("aarch64", "arm64") else _OTHER
