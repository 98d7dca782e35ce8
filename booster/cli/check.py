"""`booster check -i`: says what is installed, and whether something that the project needs is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from typing import Any

__all__ = ["add_parser", "check"]

# The distributions of pyproject.toml's dependencies, with the least version that works where there is one.
REQUIRED: dict[str, tuple[int, int] | None] = {
    "torch": (2, 10),
    "safetensors": (0, 5),
    "psutil": None,
    "packaging": None,
    "ninja": None,
    "pybind11": None,
    "numpy": None,
    "tqdm": None,
}


def add_parser(commands: Any) -> None:
    """Adds the command's parser to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check", help="look at the installation", description="Look at the installation."
    )
    parser.add_argument("-i", "--installation", action="store_true", help="list versions, backends, devices, kernels")
    parser.set_defaults(handle=check)


def check(arguments: argparse.Namespace) -> int:
    """Prints the report and returns 0, or 1 if something that the project needs is missing."""
    if not arguments.installation:
        print("booster check: say what to look at: booster check -i looks at the installation", file=sys.stderr)
        return 2
    problems: list[str] = []
    _print_rows("versions", [("python", platform.python_version()), *_version_rows(problems)])
    _print_rows("torch", _torch_rows(problems))
    _print_rows("compiler", [("c++", _compiler())])
    _print_rows("kernels", _kernel_rows(problems))
    if problems:
        print(f"MISSING: {'; '.join(problems)}")
        return 1
    print("OK: everything that the project needs is there")
    return 0


def _print_rows(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"{title}:")
    for name, text in rows:
        print(f"  {name:<16} {text}")


def _version_rows(problems: list[str]) -> list[tuple[str, str]]:
    rows = [("booster", _version("torch-booster") or "not installed as a package")]
    for name, least in REQUIRED.items():
        version = _version(name)
        if version is None:
            problems.append(f"{name} is not installed (pip install {name})")
        elif least is not None and _release(version) < least:
            wanted = ".".join(map(str, least))
            problems.append(f"{name} {version} is too old (pip install '{name}>={wanted}')")
        rows.append((name, version or "MISSING"))
    return rows


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, int]:
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (numbers[0], 0)


def _torch_rows(problems: list[str]) -> list[tuple[str, str]]:
    try:
        import torch.distributed as dist
    except ImportError as error:
        problems.append(f"torch can't be imported ({error})")
        return [("import", f"MISSING: {error}")]
    if not dist.is_available():
        problems.append("this torch was built without torch.distributed (install one from pytorch.org)")
        return [("distributed", "MISSING")]
    from booster.launch_settings import available_backends

    present = available_backends()
    names = [f"{name} {'yes' if name in present else 'no'}" for name in ("gloo", "nccl", "mpi")]
    return [("backends", ", ".join(names)), ("devices", _devices()), ("cores", str(os.cpu_count()))]


def _devices() -> str:
    from booster.device import device_type, num_devices

    kind = device_type()
    return "cpu" if kind == "cpu" else f"{num_devices()} x {kind}"


def _compiler() -> str:
    from booster.kernels.building import BuildError, find_toolchain

    try:
        toolchain = find_toolchain()
    except BuildError as error:
        return f"nothing can be compiled: {error}"
    return f"{toolchain.version} ({toolchain.compiler})"


def _kernel_rows(problems: list[str]) -> list[tuple[str, str]]:
    try:
        from booster.device import device_type
        from booster.kernels.loader import kernel_mode
        from booster.kernels.registry import kernel_status
        from booster.kernels.sources import KERNELS
    except ImportError as error:  # torch itself is missing: said above
        return [("kernels", f"can't be looked at ({error})")]
    if kernel_mode() == "native":
        missing = [one.name for one in kernel_status() if one.name in KERNELS and one.status == "reference"]
        if missing:
            problems.append(f"BOOSTER_KERNELS=native asks for kernels that can't be had: {', '.join(missing)}")
    rows = [(kernel.name, f"{kernel.status} ({kernel.reason})") for kernel in kernel_status(device_type())]
    return rows or [("none", "no kernel is registered")]
