"""`booster check`: check the installed versions, devices, kernels and communication of this machine."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from booster.device import default_backend, device_type, num_cores, num_devices
from booster.errors import ConfigError
from booster.kernels.build import KERNELS, BuildError, find_toolchain
from booster.kernels.loader import kernel_mode, kernel_status
from booster.version import __version__

from .arguments import add_command
from .run.node_config import rank_variables

_LONGEST_SECONDS = 86400


def add_parser(commands: Any) -> None:
    """Add the parser of `booster check` to argparse's subparsers."""
    parser = add_command(
        commands,
        "check",
        check,
        help="check the installation",
        description="Check the installation. The exit code is 0 if no problem was found, 1 for a problem, 2 for "
        "invalid arguments.",
    )
    parser.add_argument(
        "-i",
        "--installation",
        action="store_true",
        help="check versions and their compatibility, devices, backends, compiler, kernels",
    )
    parser.add_argument("--comm", action="store_true", help="all-reduce a tensor between two processes")
    parser.add_argument("--comm-timeout", type=float, default=120, metavar="SECONDS", help="time limit of --comm (120)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def check(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code: 0, 1 for a problem, 2 if no check was selected."""
    if not arguments.installation and not arguments.comm:
        print(
            "booster check: nothing to check: give -i to check the installation, --comm to check communication",
            file=sys.stderr,
        )
        return 2
    if not 0 < arguments.comm_timeout <= _LONGEST_SECONDS:
        raise ConfigError(
            f"--comm-timeout={arguments.comm_timeout:g} is out of range: give seconds above 0, up to {_LONGEST_SECONDS}"
        )
    sections: list[Section] = []
    if arguments.installation:
        sections += [versions(), extras(), torch_backends()]
        sections += [devices(), compiler(), kernels()]
    if arguments.comm:
        try:
            sections.append(communication(arguments.comm_timeout))
        except KeyboardInterrupt:
            print("booster check: terminated by SIGINT, with both processes", file=sys.stderr)
            return 128 + signal.SIGINT
    print(as_json(sections) if arguments.json else as_text(sections), flush=True)
    return 1 if problems_of(sections) else 0


_NAME_WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check as text and as values for JSON, and the problem and its remedy, if there is one."""

    name: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Findings of one category."""

    title: str
    findings: Sequence[Finding]


def problems_of(sections: Sequence[Section]) -> list[str]:
    """Return the problems in the order of the checks."""
    return [found.problem for section in sections for found in section.findings if found.problem is not None]


def as_text(sections: Sequence[Section]) -> str:
    """Return a line for each finding, followed by the overall result."""
    lines = []
    for section in sections:
        lines.append(f"{section.title}:")
        lines += [f"  {found.name:<{_NAME_WIDTH}} {found.text}" for found in section.findings]
    problems = problems_of(sections)
    lines.append(f"PROBLEMS: {'; '.join(problems)}" if problems else "OK: all checks passed")
    return "\n".join(lines)


def as_json(sections: Sequence[Section]) -> str:
    """Return a JSON object with `ok`, `problems`, and an object of facts by name for every section."""
    problems = problems_of(sections)
    found: dict[str, Any] = {"ok": not problems, "problems": problems}
    for section in sections:
        found[section.title] = {one.name: {**one.data, "ok": one.problem is None} for one in section.findings}
    return json.dumps(found, indent=2)


def accelerators() -> list[Finding]:
    """Return findings on torch's build and driver, nccl and every accelerator."""
    kind = device_type()
    findings = [_build()]
    if kind == "cuda" and dist.is_available() and dist.is_nccl_available():
        version = ".".join(map(str, torch.get_device_module(kind).nccl.version()))
        findings.append(Finding(name="nccl", text=version, data={"have": version}))
    return findings + [_device(kind, index) for index in range(num_devices() if kind != "cpu" else 0)]


def driver_problem(built_for: str | None, driver: tuple[int, int] | None) -> str | None:
    """Return why a driver for CUDA up to a version can't run torch's build, such as "12.8"; None if it can."""
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


_BACKENDS = ("gloo", "nccl", "mpi")
_NO_DISTRIBUTED = "this torch was built without torch.distributed (install one from pytorch.org)"


def torch_backends() -> Section:
    """Return the communication backends of this torch, and the default one."""
    if not dist.is_available():
        return Section(title="torch", findings=[Finding(name="backends", text="MISSING", problem=_NO_DISTRIBUTED)])
    from booster.launch.environments import available_backends  # here: it needs torch.distributed

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
    usable = num_cores()
    memory = psutil.virtual_memory()
    data = {"cores": os.cpu_count(), "usable_cores": usable, "memory": memory.total, "free_memory": memory.available}
    free_gib, total_gib = memory.available / 2**30, memory.total / 2**30
    text = f"{usable} of {os.cpu_count()} cores, {free_gib:.1f} of {total_gib:.1f} GiB free"
    return Section(title="devices", findings=[Finding(name="cpu", text=text, data=data), *accelerators()])


def compiler() -> Section:
    """Return the C++ compiler for kernels, or the reason why none is usable."""
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
    findings = []
    try:
        is_required = kernel_mode() == "native"
        for kernel in kernel_status(device_type()):
            problem = None
            if is_required and kernel.name in KERNELS and kernel.status == "reference":
                problem = (
                    f"BOOSTER_KERNELS=native requires kernel {kernel.name}, which is unavailable ({kernel.reason})"
                )
            data = {"status": kernel.status, "why": kernel.reason}
            text = f"{kernel.status} ({kernel.reason})"
            findings.append(Finding(name=kernel.name, text=text, data=data, problem=problem))
    except ConfigError as error:
        findings = [Finding(name="setting", text=f"WRONG: {error}", problem=str(error))]
    return Section(title="kernels", findings=findings)


_MinVersion = tuple[int, int] | None  # minimum version, None for any

# Requirements of pyproject.toml; a test compares them. Repeated here because the package's metadata, or a parser for
# it, may be missing.
PYTHON = (3, 10)
REQUIRED: dict[str, _MinVersion] = {
    "torch": (2, 10),
    "safetensors": (0, 5),
    "psutil": None,
    "packaging": None,
    "ninja": None,
    "pybind11": None,
    "numpy": None,
    "tqdm": None,
}
EXTRAS: dict[str, dict[str, _MinVersion]] = {
    "hf": {"transformers": (5, 0)},
    "plot": {"matplotlib": None},
    "tensorboard": {"tensorboard": None},
    "wandb": {"wandb": None},
    "mlflow": {"mlflow": None},
    "lora": {"peft": (0, 17)},
    "trainer": {"accelerate": (1, 1)},
    "ray": {"ray": (2, 40)},
    "auto": {"scipy": (1, 9)},
}
NEWEST_TESTED_TORCH = (2, 14)


def versions() -> Section:
    """Check the versions of Python, the project and its required packages."""
    return Section(title="versions", findings=[_python(), _project(), *(_required(name) for name in REQUIRED)])


def extras() -> Section:
    """Check the versions of optional packages."""
    pairs = [(extra, name, min_version) for extra, needed in EXTRAS.items() for name, min_version in needed.items()]
    return Section(title="extras", findings=[_extra(*pair) for pair in pairs])


def _python() -> Finding:
    installed_version = platform.python_version()
    problem = None
    if _release(installed_version) < PYTHON:
        problem = f"Python {installed_version} is too old (install Python {_dotted(PYTHON)} or newer)"
    data = {
        "have": installed_version,
        "need": f">={_dotted(PYTHON)}",
        "implementation": platform.python_implementation(),
    }
    return Finding(name="python", text=_state(installed_version, PYTHON, problem), data=data, problem=problem)


def _project() -> Finding:
    installed, path = _version("torch-booster"), str(Path(__file__).parents[1])
    data = {"have": __version__, "installed": installed, "path": path}
    text = f"{__version__} ({path})"
    problem = None
    if installed is None:
        text += ", not installed as a package"
    elif installed != __version__:
        problem = (
            f"this is booster {__version__} from {path}, but torch-booster {installed} is installed "
            "(install again: pip install .)"
        )
    return Finding(name="booster", text=text, data=data, problem=problem)


def _required(name: str) -> Finding:
    installed_version, min_version = _version(name), REQUIRED[name]
    command, problem = f"(pip install '{name}{_at_least(min_version)}')", None
    if installed_version is None:
        problem = f"{name} is not installed {command}"
    elif min_version is not None and _release(installed_version) < min_version:
        problem = f"{name} {installed_version} is too old {command}"
    text = _state(installed_version, min_version, problem)
    data: dict[str, Any] = {"have": installed_version, "need": _at_least(min_version) or "any"}
    if name == "torch":
        data["tested"] = installed_version is None or _release(installed_version) <= NEWEST_TESTED_TORCH
        if not data["tested"]:
            text += f", newer than the latest tested version ({_dotted(NEWEST_TESTED_TORCH)})"
    return Finding(name=name, text=text, data=data, problem=problem)


def _extra(extra: str, name: str, min_version: _MinVersion) -> Finding:
    installed_version = _version(name)
    is_usable = installed_version is not None and (min_version is None or _release(installed_version) >= min_version)
    command = f"pip install 'torch-booster[{extra}]'"
    data = {"have": installed_version, "need": _at_least(min_version) or "any", "extra": extra, "usable": is_usable}
    if is_usable:
        text = _state(installed_version, min_version, None)
    else:
        state = "not installed" if installed_version is None else f"{installed_version} is too old"
        text = f"{state} (optional: {command})"
    return Finding(name=name, text=text, data=data)


def _state(installed_version: str | None, min_version: _MinVersion, problem: str | None) -> str:
    requirement = f" (needs {_dotted(min_version)} or newer)" if min_version is not None else ""
    if installed_version is None:
        return f"MISSING{requirement}"
    return f"{installed_version}{requirement}{': TOO OLD' if problem is not None else ''}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = [*map(int, re.findall(r"\d+", version)), 0, 0]
    return major, minor


def _at_least(min_version: _MinVersion) -> str:
    return "" if min_version is None else f">={_dotted(min_version)}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


RANK_COMMAND = (sys.executable, "-m", "booster.cli.check_rank")
_NAME = "all-reduce"
_NUM_RANKS = 2
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 2.0  # for a process to report its error after the other has failed
_LATE_ADVICE = "raise --comm-timeout, or check the load of this machine"
_ADVICE = (
    "check that processes of this machine may connect to localhost; if shared memory failed, set "
    "BOOSTER_SHARED_MEMORY=off"
)


class _RankProcess:
    def __init__(self, rank: int, folder: Path, port: int, timeout_seconds: float, command: Sequence[str]) -> None:
        environment = os.environ | rank_variables(rank, _NUM_RANKS, port)
        if device_type() == "cuda" and num_devices() < _NUM_RANKS:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # nccl needs a device per rank
        self.rank = rank
        self._record_path, self._stderr_path = folder / f"rank_{rank}.json", folder / f"rank_{rank}.txt"
        words = [*command, str(self._record_path), str(timeout_seconds)]
        with self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=stderr, stderr=stderr)

    def record(self) -> dict[str, Any]:
        # No record: it is still importing torch, or failed to.
        return json.loads(self._record_path.read_text()) if self._record_path.is_file() else {"step": "starting"}

    def failure_text(self) -> str:
        record, code = self.record(), self.process.returncode
        reason = record.get("error")
        if reason is None:
            lines = self._stderr_path.read_text(errors="replace").split("\n")
            last_line = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            exit_text = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            reason = f"{exit_text} ({last_line})"
        return f"rank {self.rank} failed while {record['step']}: {reason}"


def communication(timeout_seconds: float, command: Sequence[str] = RANK_COMMAND) -> Section:
    """All-reduce a tensor between two processes, and return the backend and the time taken.

    They communicate as two ranks of this machine: by nccl if there are two CUDA devices, else on the CPU. Processes
    that still run at the timeout are killed and reported.
    """
    start = time.monotonic()
    records: list[dict[str, Any]] = []
    if not dist.is_available():
        problem: str | None = _NO_DISTRIBUTED
    else:
        with tempfile.TemporaryDirectory(prefix="booster_check_") as folder:
            try:
                records, problem = _run(Path(folder), timeout_seconds, command)
            except dist.DistError as error:
                problem = f"can't start a store server at localhost ({error}); {_ADVICE}"
    seconds = round(time.monotonic() - start, 3)
    if problem is None:
        return Section(title="communication", findings=[_success(records, seconds)])
    problem = f"two processes can't communicate: {problem}"
    data = {"ranks": _NUM_RANKS, "total_seconds": seconds, "error": problem}
    failure = Finding(name=_NAME, text="FAILED", data=data, problem=problem)
    return Section(title="communication", findings=[failure])


def _run(folder: Path, timeout_seconds: float, command: Sequence[str]) -> tuple[list[dict[str, Any]], str | None]:
    deadline = time.monotonic() + timeout_seconds
    # Served by this process, so that the system chooses the port.
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]  # no __all__ there
    ranks: list[_RankProcess] = []
    try:
        for number in range(_NUM_RANKS):
            ranks.append(_RankProcess(number, folder, store.port, timeout_seconds, command))
        problem = _wait(ranks, deadline)
        late = [f"rank {rank.rank} was {rank.record()['step']}" for rank in ranks if rank.process.poll() is None]
    finally:
        for process in (rank.process for rank in ranks):
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
    records = [rank.record() for rank in ranks]
    wrong = [rank.rank for rank, record in zip(ranks, records, strict=True) if record.get("is_right") is False]
    if problem is not None:
        return records, f"{problem}; {_ADVICE}"
    if late:
        return records, f"timed out after {timeout_seconds:g} s: {', '.join(late)}; {_LATE_ADVICE}"
    if wrong:
        return records, f"rank(s) {wrong} got wrong sums by {records[wrong[0]]['transport']}; {_ADVICE}"
    return records, None


def _wait(ranks: Sequence[_RankProcess], deadline: float) -> str | None:
    """Wait until all have exited, one has failed or the deadline passed; return the first failure."""
    first: _RankProcess | None = None
    while time.monotonic() < deadline and any(rank.process.poll() is None for rank in ranks):
        time.sleep(_POLL_SECONDS)
        if first is None:
            first = next((rank for rank in ranks if rank.process.poll() not in (None, 0)), None)
            if first is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    failed = [rank for rank in ranks if rank.process.poll() not in (None, 0)]
    if not failed:
        return None
    # Both may have failed: a killed one leaves no error, and the other reports a lost connection.
    cause = next((rank for rank in failed if "error" not in rank.record()), first or failed[0])
    return cause.failure_text()


def _success(records: Sequence[dict[str, Any]], seconds: float) -> Finding:
    first, slowest = records[0], max(record["seconds"] for record in records)
    speed = first["bytes"] / slowest
    data = {"ranks": _NUM_RANKS, "total_seconds": seconds, "seconds": slowest, "bytes_per_second": speed}
    data |= {name: first[name] for name in ("backend", "transport", "device", "bytes")}
    transport = " and ".join(dict.fromkeys((first["backend"], first["transport"])))
    text = (
        f"{first['bytes'] / 2**20:.0f} MiB on {first['device']} over {_NUM_RANKS} processes by {transport}: "
        f"{1000 * slowest:.1f} ms, {speed / 1e9:.2f} GB/s; sums are right; {seconds:.1f} s including start-up"
    )
    return Finding(name=_NAME, text=text, data=data)
