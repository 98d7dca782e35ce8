"""Compiles the simulated device, once for each version of its sources, of torch and of Python.

Run: python -m simulated_cuda.build FOLDER (in tests/), which compiles into a folder. `library()` does so where needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
NAME = "simulated_cuda_native"
_FLAGS = ("-O1", "-std=c++20", "-w", "-DUSE_DISTRIBUTED")
_TIMEOUT_SECONDS = 1200
_SHOWN_CHARACTERS = 2000


def library() -> Path:
    """Return the path of the compiled device, which is compiled first if it is not there. Does not import torch.

    Raises:
        RuntimeError: The compiler failed.
    """
    folder = _cache() / f"{NAME}-{_digest()}"
    path = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its process, unlike the lock files of torch's loader
        if not path.exists():
            command = [sys.executable, "-m", "simulated_cuda.build", str(folder)]
            tests = Path(__file__).parents[1]
            done = subprocess.run(
                command, cwd=tests, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
            )
            if done.returncode != 0:
                raise RuntimeError(f"the simulated device did not compile:\n{done.stdout[-_SHOWN_CHARACTERS:]}")
    return path


def _cache() -> Path:
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(folder) if folder else Path.home() / ".cache" / "torch_extensions"


def _digest() -> str:
    digest = hashlib.sha256(repr((_FLAGS, version("torch"), sys.version)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_into(folder: Path) -> None:
    """Compile the device into a folder, with torch's tools for extensions."""
    from torch.utils.cpp_extension import load

    work = folder / "work"
    work.mkdir(exist_ok=True)
    (work / "lock").unlink(missing_ok=True)  # of a build that was killed
    load(
        name=NAME,
        sources=sorted(map(str, SOURCES.glob("*.cpp"))),
        build_directory=str(work),
        extra_cflags=list(_FLAGS),
        is_python_module=False,
        is_standalone=False,
    )
    (work / f"{NAME}.so").rename(folder / f"{NAME}.so")


if __name__ == "__main__":
    compile_into(Path(sys.argv[1]))
