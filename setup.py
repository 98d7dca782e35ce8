"""Builds the kernels ahead of their first use: `BOOSTER_BUILD_KERNELS=1 pip install .`; without that, pure Python.

Everything else is in pyproject.toml.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PREBUILT = Path("booster", "kernels", "prebuilt")


def builds_kernels() -> bool:
    return os.environ.get("BOOSTER_BUILD_KERNELS", "0") not in ("", "0")


def kernel_module(name: str) -> types.ModuleType:
    """Imports booster.kernels.<name> from the sources without the package itself, which would need torch."""
    for package, folder in (("booster", ROOT / "booster"), ("booster.kernels", ROOT / "kernels")):
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(folder)]
            sys.modules[package] = module
    return importlib.import_module(f"booster.kernels.{name}")


def build_all(target: Path) -> list[Path]:
    """Compiles every kernel into a folder, with the hashes of what they were compiled from; returns the files."""
    kernels = kernel_module("build")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    hashes = {}
    for source in kernels.KERNELS.values():
        print(f"building the kernel {source.name!r}", flush=True)
        with tempfile.TemporaryDirectory() as work:
            shutil.copy2(kernels.build(source, Path(work)), target / source.file_name)
        hashes[source.name] = source.source_hash()
    (target / "source_hashes.json").write_text(json.dumps(hashes, indent=1))
    return sorted(target.iterdir())


class BuildPython(build_py):
    """Copies the Python files, and beside them the compiled kernels where they are asked for."""

    _kernel_files: tuple[str, ...] = ()

    def run(self) -> None:
        super().run()
        if builds_kernels():
            target = ROOT / "kernels" / "prebuilt" if self.editable_mode else Path(self.build_lib) / PREBUILT
            self._kernel_files = tuple(map(str, build_all(target)))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *self._kernel_files]


class PlatformDistribution(Distribution):
    """A wheel with compiled kernels is for one Python on one platform."""

    def has_ext_modules(self) -> bool:
        return builds_kernels()


if __name__ == "__main__":  # walking over the package in a checkout comes by here
    setup(cmdclass={"build_py": BuildPython}, distclass=PlatformDistribution)
