"""Where a measurement was made: versions, machine, date, arguments."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_run"]

_PEERS = ("accelerate", "lightning", "deepspeed", "transformers", "numpy")


def describe_run(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a reader needs to judge or repeat a measurement, ready for JSON.

    Args:
        arguments: The command line's, by name.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "arguments": dict(sorted(arguments.items())),
        "versions": _versions(),
        "machine": {
            "cpu": _cpu_model(),
            "cores": _usable_cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
            "device": _device_name(),
        },
    }


def _versions() -> dict[str, str]:
    import booster

    versions = {"python": platform.python_version(), "torch": torch.__version__, "booster": booster.__version__}
    for package in _PEERS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _device_name() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    return str(torch.get_device_module(accelerator).get_device_name())
