"""Loads a compiled kernel, building it on first use; says once why, where plain torch has to take its place.

`BOOSTER_KERNELS` chooses: `auto` (not set: compiled where that works), `native` (compiled, or an error that says why
not), `reference` (plain torch, nothing is built). `BOOSTER_KERNEL_CACHE` names the folder for compiled kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from booster.errors import ConfigError
from booster.kernels.build_cache import BuildCache, default_folder
from booster.kernels.building import BuildError, find_toolchain, obstacle
from booster.kernels.sources import KERNELS, KernelSource
from booster.logger import get_dist_logger

__all__ = ["find_built", "kernel_mode", "load_kernel"]

MODE_VARIABLE = "BOOSTER_KERNELS"
_MODES = ("auto", "native", "reference")
# Written by `BOOSTER_BUILD_KERNELS=1 pip install`; see setup.py.
PREBUILT_FOLDER = Path(__file__).parent / "prebuilt"
PREBUILT_RECORD = "source_hashes.json"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How loading went: the module, or why there is none."""

    module: ModuleType | None
    reason: str | None


_outcomes: dict[str, _Outcome] = {}
_lock = threading.Lock()


def kernel_mode() -> str:
    """Returns what `BOOSTER_KERNELS` asks for: "auto", "native" or "reference".

    Raises:
        ConfigError: It is something else.
    """
    mode = os.environ.get(MODE_VARIABLE) or "auto"
    if mode not in _MODES:
        raise ConfigError(f"{MODE_VARIABLE}={mode!r} is unknown: set it to one of {', '.join(_MODES)}, or unset it")
    return mode


def load_kernel(name: str) -> ModuleType | None:
    """Returns a compiled kernel's module, or None where its reference in plain torch is to be used.

    The first call in a machine's life builds it, which takes some seconds and is announced; the first call of a process
    loads it; later ones cost a look into a dictionary. A kernel that can't be had is warned about once.

    Args:
        name: A key of `booster.kernels.sources.KERNELS`.

    Raises:
        ConfigError: `BOOSTER_KERNELS` is `native` and the kernel can't be built, or has no known value.
    """
    mode = kernel_mode()
    if mode == "reference":
        return None
    outcome = _outcomes.get(name)
    if outcome is None:
        with _lock:
            outcome = _outcomes.get(name) or _load(KERNELS[name], warns=mode == "auto")
            _outcomes[name] = outcome
    if outcome.module is None and mode == "native":
        raise ConfigError(
            f"{MODE_VARIABLE}=native asks for the compiled kernel {name!r}, which can't be had: {outcome.reason}. Mend"
            f" that, or unset {MODE_VARIABLE} to use plain torch in its place"
        )
    return outcome.module


def find_built(source: KernelSource) -> Path | None:
    """Returns the path of a kernel that is compiled already; None: the first use would build it."""
    ahead = _prebuilt(source)
    if ahead is not None:
        return ahead
    try:
        path = BuildCache(default_folder()).path_of(source, find_toolchain())
    except (BuildError, OSError):
        return None
    return path if path.is_file() else None


def _load(source: KernelSource, *, warns: bool) -> _Outcome:
    try:
        return _Outcome(_imported(source, _prebuilt(source) or _build(source)), None)
    except (BuildError, ImportError, OSError) as error:
        reason = str(error)
    if warns:
        get_dist_logger().warning(
            f"the kernel {source.name!r} ({source.purpose}) runs in plain torch, with the same results but slower:"
            f" {reason}"
        )
    return _Outcome(None, reason)


def _build(source: KernelSource) -> Path:
    reason = obstacle(source)
    if reason is not None:
        raise BuildError(reason)
    return BuildCache(default_folder()).get(source, find_toolchain(), get_dist_logger().info)


def _prebuilt(source: KernelSource) -> Path | None:
    """Returns the module that was built at installation; one of other sources, as in an edited checkout, is not it."""
    path, record = PREBUILT_FOLDER / source.file_name, PREBUILT_FOLDER / PREBUILT_RECORD
    if not path.is_file() or not record.is_file():
        return None
    return path if json.loads(record.read_text()).get(source.name) == source.source_hash() else None


def _imported(source: KernelSource, path: Path) -> ModuleType:
    loader = ExtensionFileLoader(source.module_name, str(path))
    spec = importlib.util.spec_from_file_location(source.module_name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no extension module of this Python")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
