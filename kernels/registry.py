"""Status of the kernels: compiled, or reference implementation in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .build import KERNELS, KernelSource, find_toolchain, missing_requirement
from .float8 import GRADIENT_DTYPE, native_problem
from .loader import MODE_VARIABLE, find_built, kernel_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStatus:
    """Status of one kernel in this process.

    Attributes:
        name: Name of the kernel.
        status: "native" if a compiled kernel exists, "buildable" if the first use will compile it, and "reference" if
            plain torch is used instead.
        reason: Path of the compiled kernel, compiler that would build it, or what is missing.
    """

    name: str
    status: Literal["native", "buildable", "reference"]
    reason: str


def kernel_status(device_type: str = "cpu") -> list[KernelStatus]:
    """Return the status of every kernel, compiled ones first. Builds nothing.

    Args:
        device_type: Device type that the kernels would run on: "cpu", "cuda", ...

    Raises:
        ConfigError: `BOOSTER_KERNELS` has an unknown value.
    """
    return [*map(_status_of, KERNELS.values()), _float8_matmul(device_type)]


def _status_of(source: KernelSource) -> KernelStatus:
    if kernel_mode() == "reference":
        return KernelStatus(name=source.name, status="reference", reason=f"{MODE_VARIABLE}=reference is set")
    path = find_built(source)
    if path is not None:
        return KernelStatus(name=source.name, status="native", reason=str(path))
    reason = missing_requirement(source)
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
