"""Checks of accelerators: compatibility of driver, torch build and devices."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import torch

from booster.cli.check_report import Finding
from booster.device import device_type, num_devices

__all__ = ["accelerators", "can_run_on", "driver_problem"]


def accelerators() -> list[Finding]:
    """Return findings on torch's build and driver, nccl and every accelerator."""
    return [_build(), *_nccl(), *_devices()]


def driver_problem(built_for: str | None, driver: tuple[int, int] | None) -> str | None:
    """Return why a driver can't run torch's build; None if it can, or if either is missing.

    Args:
        built_for: CUDA version of torch's build, such as "12.8".
        driver: Newest CUDA version that the driver supports.
    """
    if built_for is None or driver is None or driver[0] >= int(built_for.split(".")[0]):
        return None  # within a major version older drivers run newer builds
    return (
        f"torch was built for CUDA {built_for}, but the driver supports CUDA up to {driver[0]}.{driver[1]} (install a "
        "newer driver, or a torch for that CUDA from pytorch.org)"
    )


def can_run_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether a build for these architectures ("sm_80", "compute_90", ...) runs on a device.

    Binary code (sm) runs on devices of the same major and at least the same minor version, with the suffix "a" on
    exactly its version; PTX (compute) on all devices of at least its version. True if no architectures are given.
    """
    for text in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", text)
        if match is None:
            return True  # unknown naming scheme
        version = (int(match[2]), int(match[3]))
        if match[4] == "a":
            fits = capability == version
        elif match[1] == "sm":
            fits = capability[0] == version[0] and capability[1] >= version[1]
        else:
            fits = capability >= version
        if fits:
            return True
    return not architectures


def _build() -> Finding:
    built_for, driver = torch.version.cuda, _cuda_driver()
    data = {
        "cuda": built_for,
        "hip": torch.version.hip,
        "driver": None if driver is None else f"{driver[0]}.{driver[1]}",
        "device_type": device_type(),
        "count": num_devices() if device_type() != "cpu" else 0,
    }
    problem = driver_problem(built_for, driver)
    if built_for is None and torch.version.hip is None:
        text = "none, this torch is a build without CUDA" if device_type() == "cpu" else device_type()
        if driver is not None:
            text += f"; the machine has a driver for CUDA {data['driver']}: install a torch for it to use it"
    elif built_for is None:
        text = f"torch is built for ROCm {torch.version.hip}"
    else:
        driver_text = "no driver is installed" if driver is None else f"the driver supports up to {data['driver']}"
        text = f"torch is built for CUDA {built_for}, {driver_text}{': TOO OLD' if problem else ''}"
    if device_type() == "cpu" and (built_for or torch.version.hip):
        text += "; no device can be used"
    return Finding(name="accelerator", text=text, data=data, problem=problem)


def _cuda_driver() -> tuple[int, int] | None:
    """Return the newest CUDA version that the installed driver supports, or None without a driver."""
    number = ctypes.c_int()
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value > 0:
                return number.value // 1000, number.value % 1000 // 10
        except (OSError, AttributeError):  # no such library, or a stub
            continue
    return None


def _nccl() -> list[Finding]:
    if device_type() != "cuda" or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return []
    version = ".".join(map(str, torch.get_device_module(device_type()).nccl.version()))
    return [Finding(name="nccl", text=version, data={"have": version})]


def _devices() -> list[Finding]:
    return [] if device_type() == "cpu" else [_device(device_type(), index) for index in range(num_devices())]


def _device(kind: str, index: int) -> Finding:
    module = torch.get_device_module(kind)
    if not hasattr(module, "get_device_properties"):
        return Finding(name=f"{kind}:{index}", text="torch reports no properties of it")
    properties = module.get_device_properties(index)
    text = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    data: dict[str, Any] = {"name": properties.name, "memory": properties.total_memory}
    problem = None
    if kind == "cuda":
        capability = (properties.major, properties.minor)
        architectures = [] if torch.version.hip else module.get_arch_list()
        text += f", capability {capability[0]}.{capability[1]}"
        data["capability"] = list(capability)
        if not can_run_on(capability, architectures):
            text += ": NOT SUPPORTED"
            problem = (
                f"cuda:{index} ({properties.name}) has capability {capability[0]}.{capability[1]}, but this torch was "
                f"built for {', '.join(architectures)} (install another torch from pytorch.org, or hide the device)"
            )
    return Finding(name=f"{kind}:{index}", text=text, data=data, problem=problem)
