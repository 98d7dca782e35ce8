"""The list of kernels, and whether each runs compiled or as its reference in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .build import KERNELS, MODE_VARIABLE, KernelSource, find_built, find_toolchain, kernel_mode, obstacle
from .float8 import GRADIENT_DTYPE, native_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStatus:
    """How one kernel would run in this process.

    Attributes:
        name: The kernel's name.
        status: "native" where the compiled kernel is there, "buildable" where its first use will compile it, and
            "reference" where plain torch stands in for it.
        reason: Why: where it is, what it would be built with, or what is missing.
    """

    name: str
    status: Literal["native", "buildable", "reference"]
    reason: str


_Probe = Callable[[str], KernelStatus]


def register_probe(probe: _Probe) -> None:
    """Add a kernel to the list: `probe(device_type)` looks at it without building anything."""
    _probes.append(probe)


def kernel_status(device_type: str = "cpu") -> list[KernelStatus]:
    """Return the state of every kernel, those with sources of their own first. Builds nothing.

    Args:
        device_type: The kind of device that they would run on: "cpu", "cuda", ...

    Raises:
        ConfigError: `BOOSTER_KERNELS` has no known value.
    """
    return [_compiled(source) for source in KERNELS.values()] + [probe(device_type) for probe in _probes]


def _compiled(source: KernelSource) -> KernelStatus:
    if kernel_mode() == "reference":
        return KernelStatus(name=source.name, status="reference", reason=f"{MODE_VARIABLE}=reference asks for it")
    path = find_built(source)
    if path is not None:
        return KernelStatus(name=source.name, status="native", reason=str(path))
    reason = obstacle(source)
    if reason is not None:
        return KernelStatus(name=source.name, status="reference", reason=reason)
    return KernelStatus(name=source.name, status="buildable", reason=f"at its first use, by {find_toolchain().version}")


def _float8_matmul(device_type: str) -> KernelStatus:
    name = "float8 matmul"
    if device_type == "cpu":
        return KernelStatus(name=name, status="reference", reason="emulated in fp32, which is faster on the CPU")
    problem = native_problem(device_type) or native_problem(device_type, GRADIENT_DTYPE)
    if problem is not None:
        return KernelStatus(name=name, status="reference", reason=f"emulated in fp32: {problem}")
    return KernelStatus(name=name, status="native", reason=f"torch's scaled matmul on {device_type}")


_probes: list[_Probe] = [_float8_matmul]
