"""Accelerators, and whether driver, torch's build and the devices go together."""

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
    """Returns what torch was built for, the driver, nccl and every accelerator; on a plain CPU that there is none."""
    return [_build(), *_nccl(), *_devices()]


def driver_problem(built_for: str | None, driver: tuple[int, int] | None) -> str | None:
    """Returns why a driver can't run what torch was built for; None where it can, or where one of them is missing.

    Args:
        built_for: CUDA's version that torch was built with, as "12.8".
        driver: The newest CUDA that the driver knows.
    """
    if built_for is None or driver is None or driver[0] >= int(built_for.split(".")[0]):
        return None  # within a major version older drivers run newer builds
    return (
        f"torch was built for CUDA {built_for}, and the driver knows CUDA up to {driver[0]}.{driver[1]} (install a "
        "newer driver, or a torch for that CUDA from pytorch.org)"
    )


def can_run_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Returns whether a build for these architectures ("sm_80", "compute_90", ...) runs on a device.

    Machine code (sm) runs on devices of its major version from its minor version on, with the suffix "a" on exactly its
    own; portable code (compute) on all from its version on. No architectures: nothing is known, so True.
    """
    for text in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", text)
        if match is None:
            return True  # of a kind that is not known here
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
    facts = {
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
            text += f"; the machine has a driver for CUDA {facts['driver']}: install a torch for it to use it"
    elif built_for is None:
        text = f"torch is built for ROCm {torch.version.hip}"
    else:
        there = "no driver is there" if driver is None else f"the driver knows up to {facts['driver']}"
        text = f"torch is built for CUDA {built_for}, {there}{': TOO OLD' if problem else ''}"
    if device_type() == "cpu" and (built_for or torch.version.hip):
        text += "; no device can be used"
    return Finding(name="accelerator", text=text, facts=facts, problem=problem)


def _cuda_driver() -> tuple[int, int] | None:
    """Returns the newest version of CUDA that the installed driver knows; None without a driver. Needs no torch."""
    number = ctypes.c_int()
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value > 0:
                return number.value // 1000, number.value % 1000 // 10
        except (OSError, AttributeError):  # no such library here, or a stub
            continue
    return None


def _nccl() -> list[Finding]:
    if device_type() != "cuda" or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return []
    version = ".".join(map(str, torch.get_device_module(device_type()).nccl.version()))
    return [Finding(name="nccl", text=version, facts={"have": version})]


def _devices() -> list[Finding]:
    return [] if device_type() == "cpu" else [_device(device_type(), index) for index in range(num_devices())]


def _device(kind: str, index: int) -> Finding:
    module = torch.get_device_module(kind)
    if not hasattr(module, "get_device_properties"):
        return Finding(name=f"{kind}:{index}", text="torch tells nothing about it")
    properties = module.get_device_properties(index)
    text = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    facts: dict[str, Any] = {"name": properties.name, "memory": properties.total_memory}
    problem = None
    if kind == "cuda":
        capability = (properties.major, properties.minor)
        architectures = [] if torch.version.hip else module.get_arch_list()
        text += f", capability {capability[0]}.{capability[1]}"
        facts["capability"] = list(capability)
        if not can_run_on(capability, architectures):
            text += ": NOT SUPPORTED"
            problem = (
                f"cuda:{index} ({properties.name}) has capability {capability[0]}.{capability[1]}, and this torch is "
                f"built for {', '.join(architectures)} (install another torch from pytorch.org, or hide the device)"
            )
    return Finding(name=f"{kind}:{index}", text=text, facts=facts, problem=problem)
