"""The package that is installed is the package that is tested."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import booster

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "booster": ROOT / "booster",
    "booster.plugins": ROOT / "plugins",
    "booster.kernels": ROOT / "kernels",
    "booster.checkpoint_io": ROOT / "checkpoint_io",
}


def _table(section: str) -> str:
    text = (ROOT / "pyproject.toml").read_text()
    return text.split(section, 1)[1].split("\n[", 1)[0]


def test_every_subpackage_is_listed_for_the_wheel():
    listed = {line.strip().strip('",') for line in _table("packages = [").split("]")[0].splitlines() if line.strip()}
    found = set(FOLDERS)
    for name, folder in FOLDERS.items():
        found |= {".".join([name, *path.parent.relative_to(folder).parts]) for path in folder.rglob("*.py")}
    assert listed == found


def test_kernels_is_no_package_of_its_own():
    # With an __init__.py transformers would take the folder for Hugging Face's `kernels` if the root is on the path.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()


def test_a_second_copy_of_the_package_is_refused():
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("copy", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
    init = str(ROOT / "booster" / "__init__.py")
    result = subprocess.run([sys.executable, "-c", code, init], capture_output=True, text=True)
    assert "import this package as 'booster', not as 'copy'" in result.stderr


def test_walking_the_package_ends_and_finds_every_folder():
    names = {module.name for module in pkgutil.walk_packages(booster.__path__, "booster.", onerror=lambda name: None)}
    assert {"booster.booster", "booster.plugins.torch_ddp.plugin", "booster.checkpoint_io.checkpoint_io"} <= names
    assert not any(name.startswith("booster.booster.") for name in names)  # in a checkout it would go on for ever
    assert importlib.import_module("booster.kernels.loader")


def test_importing_does_nothing():
    code = """
import os, sys, threading, warnings
warnings.simplefilter("error")
before = dict(os.environ)
import booster, booster.data, booster.cli.run.elastic_agent
assert "torch._dynamo" not in sys.modules  # takes as long to import as torch
from booster import *
import torch.distributed as dist
assert dict(os.environ) == before, set(os.environ) ^ set(before)
assert not dist.is_initialized()
assert threading.active_count() == 1
for extra in ("transformers", "pytest", "accelerate", "peft"):
    assert extra not in sys.modules, extra
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert result.stderr == ""


def test_the_extras_are_not_needed():
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "pytest", "ruff", "mypy", "accelerate", "peft", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import pkgutil, importlib, booster
for module in pkgutil.walk_packages(booster.__path__, "booster."):
    if module.name != "booster.booster":
        importlib.import_module(module.name)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", booster.__all__)
def test_public_names_exist(name):
    assert getattr(booster, name).__doc__
