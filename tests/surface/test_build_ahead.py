"""`BOOSTER_BUILD_KERNELS=1 pip install` makes a package that needs no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from booster.kernels.build import KERNELS

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("booster", "plugins", "kernels", "checkpoint_io", "pyproject.toml", "setup.py", "README.md", "LICENSE")

LOAD_ALL = """
import booster
from booster.kernels.loader import load_kernel
from booster.kernels.loader import kernel_status
from booster.kernels.build import KERNELS
print(booster.__file__)
assert all(load_kernel(name) is not None for name in KERNELS)
print(*(f"{one.name} {one.status} {one.reason}" for one in kernel_status()), sep="\\n")
"""


@pytest.fixture
def checkout(tmp_path):
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("prebuilt", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def wheel_of(checkout, **variables):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    environment = os.environ | variables
    subprocess.run([*command, checkout / "dist", checkout], check=True, env=environment, capture_output=True)
    [wheel] = (checkout / "dist").glob("*.whl")
    return wheel


@pytest.mark.slow
def test_a_wheel_with_compiled_kernels(checkout):
    wheel = wheel_of(checkout, BOOSTER_BUILD_KERNELS="1")
    assert not wheel.name.endswith("-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(checkout / "installed")
    environment = os.environ | {
        "PYTHONPATH": str(checkout / "installed"),
        "CXX": "no-compiler",
        "BOOSTER_KERNEL_CACHE": str(checkout / "cache"),
    }
    command = [sys.executable, "-c", LOAD_ALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=checkout / "dist")
    assert done.returncode == 0, done.stderr
    place, *kernels = done.stdout.splitlines()
    assert Path(place).is_relative_to(checkout / "installed")
    assert sum("/prebuilt/" in line for line in kernels) == 4
    assert not (checkout / "cache").exists()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import setup
print(*setup.kernel_module("build").KERNELS)
"""


def test_setup_reads_the_kernels_without_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == list(KERNELS), done.stderr


@pytest.mark.slow
def test_a_wheel_without_is_for_every_platform(checkout):
    wheel = wheel_of(checkout, BOOSTER_BUILD_KERNELS="0")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = {f"booster/kernels/csrc/{path.name}" for path in (ROOT / "kernels" / "csrc").iterdir()}
    assert sources <= set(names)
    assert not any("prebuilt" in name for name in names)
