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

_Least = tuple[int, int] | None  # minimum version, None for any

# Requirements of pyproject.toml; a test compares them. Repeated here because the package's metadata, or a parser for
# it, may be missing.
PYTHON = (3, 10)
REQUIRED: dict[str, _Least] = {
    "torch": (2, 10),
    "safetensors": (0, 5),
    "psutil": None,
    "packaging": None,
    "ninja": None,
    "pybind11": None,
    "numpy": None,
    "tqdm": None,
}
EXTRAS: dict[str, dict[str, _Least]] = {
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
    pairs = [(extra, name, least) for extra, needed in EXTRAS.items() for name, least in needed.items()]
    return Section(title="extras", findings=[_extra(*pair) for pair in pairs])


def _python() -> Finding:
    have = platform.python_version()
    problem = None
    if _release(have) < PYTHON:
        problem = f"Python {have} is too old (install Python {_dotted(PYTHON)} or newer)"
    facts = {"have": have, "need": f">={_dotted(PYTHON)}", "implementation": platform.python_implementation()}
    return Finding(name="python", text=_state(have, PYTHON, problem), facts=facts, problem=problem)


def _project() -> Finding:
    installed, path = _version("torch-booster"), str(Path(booster.__file__).parent)
    facts = {"have": booster.__version__, "installed": installed, "path": path}
    text = f"{booster.__version__} ({path})"
    problem = None
    if installed is None:
        text += ", not installed as a package"
    elif installed != booster.__version__:
        problem = (
            f"this is booster {booster.__version__} from {path}, but torch-booster {installed} is installed "
            "(install again: pip install .)"
        )
    return Finding(name="booster", text=text, facts=facts, problem=problem)


def _required(name: str) -> Finding:
    have, least = _version(name), REQUIRED[name]
    problem = None
    if have is None:
        problem = f"{name} is not installed (pip install '{name}{_at_least(least)}')"
    elif least is not None and _release(have) < least:
        problem = f"{name} {have} is too old (pip install '{name}{_at_least(least)}')"
    text = _state(have, least, problem)
    is_tested = name != "torch" or have is None or _release(have) <= NEWEST_TESTED_TORCH
    if not is_tested:
        text += f", newer than the latest tested version ({_dotted(NEWEST_TESTED_TORCH)})"
    facts: dict[str, Any] = {"have": have, "need": _at_least(least) or "any"}
    if name == "torch":
        facts["tested"] = is_tested
    return Finding(name=name, text=text, facts=facts, problem=problem)


def _extra(extra: str, name: str, least: _Least) -> Finding:
    have = _version(name)
    is_usable = have is not None and (least is None or _release(have) >= least)
    command = f"pip install 'torch-booster[{extra}]'"
    facts = {"have": have, "need": _at_least(least) or "any", "extra": extra, "usable": is_usable}
    if is_usable:
        text = _state(have, least, None)
    else:
        text = f"{'not installed' if have is None else f'{have} is too old'} (optional: {command})"
    return Finding(name=name, text=text, facts=facts)


def _state(have: str | None, least: _Least, problem: str | None) -> str:
    need = f" (needs {_dotted(least)} or newer)" if least is not None else ""
    if have is None:
        return f"MISSING{need}"
    return f"{have}{need}{': TOO OLD' if problem is not None else ''}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, int]:
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (numbers[0] if numbers else 0, 0)


def _at_least(least: _Least) -> str:
    return "" if least is None else f">={_dotted(least)}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
