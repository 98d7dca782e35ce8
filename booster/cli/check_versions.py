"""Checks of the versions of Python and of required and optional packages."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

import booster
from booster.cli.check_report import Finding, Section

__all__ = ["EXTRAS", "NEWEST_TESTED_TORCH", "PYTHON", "REQUIRED", "extras", "versions"]

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
}
NEWEST_TESTED_TORCH = (2, 13)


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
    installed, path = _version("torch-booster"), str(Path(booster.__file__).parent)
    data = {"have": booster.__version__, "installed": installed, "path": path}
    text = f"{booster.__version__} ({path})"
    problem = None
    if installed is None:
        text += ", not installed as a package"
    elif installed != booster.__version__:
        problem = (
            f"this is booster {booster.__version__} from {path}, but torch-booster {installed} is installed "
            "(install again: pip install .)"
        )
    return Finding(name="booster", text=text, data=data, problem=problem)


def _required(name: str) -> Finding:
    installed_version, min_version = _version(name), REQUIRED[name]
    problem = None
    if installed_version is None:
        problem = f"{name} is not installed (pip install '{name}{_at_least(min_version)}')"
    elif min_version is not None and _release(installed_version) < min_version:
        problem = f"{name} {installed_version} is too old (pip install '{name}{_at_least(min_version)}')"
    text = _state(installed_version, min_version, problem)
    is_tested = name != "torch" or installed_version is None or _release(installed_version) <= NEWEST_TESTED_TORCH
    if not is_tested:
        text += f", newer than the latest tested version ({_dotted(NEWEST_TESTED_TORCH)})"
    data: dict[str, Any] = {"have": installed_version, "need": _at_least(min_version) or "any"}
    if name == "torch":
        data["tested"] = is_tested
    return Finding(name=name, text=text, data=data, problem=problem)


def _extra(extra: str, name: str, min_version: _MinVersion) -> Finding:
    installed_version = _version(name)
    is_usable = installed_version is not None and (min_version is None or _release(installed_version) >= min_version)
    command = f"pip install 'torch-booster[{extra}]'"
    data = {"have": installed_version, "need": _at_least(min_version) or "any", "extra": extra, "usable": is_usable}
    if is_usable:
        text = _state(installed_version, min_version, None)
    else:
        text = f"{'not installed' if installed_version is None else f'{installed_version} is too old'} (optional: {command})"
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
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (numbers[0] if numbers else 0, 0)


def _at_least(min_version: _MinVersion) -> str:
    return "" if min_version is None else f">={_dotted(min_version)}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
