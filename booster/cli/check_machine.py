"""Checks of torch, the compiler, the kernels and the devices of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

from booster.cli.check_accelerator import accelerators
from booster.cli.check_report import Finding, Section
from booster.errors import ConfigError

__all__ = ["compiler", "devices", "kernels", "torch_backends"]

_BACKENDS = ("gloo", "nccl", "mpi")


def torch_backends() -> Section:
    """Return the communication backends of this torch, and the default one."""
    import torch.distributed as dist

    from booster.device import default_backend, device_type
    from booster.launch_settings import available_backends

    if not dist.is_available():
        problem_text = "this torch was built without torch.distributed (install one from pytorch.org)"
        return Section(title="torch", findings=[Finding(name="backends", text="MISSING", problem=problem_text)])
    present = available_backends()
    default = default_backend(device_type())
    text = ", ".join(f"{name} {'yes' if name in present else 'no'}" for name in _BACKENDS)
    data = {"default": default, **{name: name in present for name in _BACKENDS}}
    problem = None
    if "gloo" not in present:
        problem = "this torch has no gloo, which ranks on CPUs need (install one from pytorch.org)"
    found = Finding(name="backends", text=f"{text}; by default {default}", data=data, problem=problem)
    return Section(title="torch", findings=[found])


def devices() -> Section:
    """Return the CPU, memory and accelerators available to ranks on this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    data = {"cores": os.cpu_count(), "usable_cores": usable, "memory": memory.total, "free_memory": memory.available}
    text = f"{usable} of {os.cpu_count()} cores, {_gib(memory.available)} of {_gib(memory.total)} GiB free"
    return Section(title="devices", findings=[Finding(name="cpu", text=text, data=data), *accelerators()])


def compiler() -> Section:
    """Return the C++ compiler for kernels, or the reason why none is usable."""
    from booster.kernels.building import BuildError, find_toolchain

    try:
        toolchain = find_toolchain()
    except BuildError as error:
        found = Finding(name="c++", text=f"no usable compiler: {error}", data={"have": None, "why": str(error)})
    else:
        data = {"have": toolchain.version, "path": toolchain.compiler}
        found = Finding(name="c++", text=f"{toolchain.version} ({toolchain.compiler})", data=data)
    return Section(title="compiler", findings=[found])


def kernels() -> Section:
    """Return the status of each kernel: built ("native"), "buildable", or replaced by plain torch ("reference")."""
    try:
        findings = _kernels()
    except ConfigError as error:
        findings = [Finding(name="setting", text=f"WRONG: {error}", problem=str(error))]
    return Section(title="kernels", findings=findings)


def _kernels() -> Sequence[Finding]:
    from booster.device import device_type
    from booster.kernels.loader import kernel_mode
    from booster.kernels.registry import kernel_status
    from booster.kernels.sources import KERNELS

    is_required = kernel_mode() == "native"
    findings = []
    for kernel in kernel_status(device_type()):
        problem = None
        if is_required and kernel.name in KERNELS and kernel.status == "reference":
            problem = f"BOOSTER_KERNELS=native requires kernel {kernel.name}, which is unavailable ({kernel.reason})"
        data = {"status": kernel.status, "why": kernel.reason}
        text = f"{kernel.status} ({kernel.reason})"
        findings.append(Finding(name=kernel.name, text=text, data=data, problem=problem))
    return findings


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
