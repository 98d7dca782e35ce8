"""The look at the installation: what is there, what goes together, and how it is said to people and programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from booster.cli import check, main
from booster.cli.check import accelerators, can_run_on, driver_problem
from booster.kernels.build import find_toolchain

ROOT = Path(__file__).parents[2]


def test_check_says_what_is_there(capsys):
    assert main(["check", "-i"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("OK")
    shown = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert {"python", "booster", "torch", "safetensors", "transformers", "cpu", "c++", "adam"} <= shown.keys()
    assert shown["backends"][:2] == ["gloo", "yes,"]
    assert shown["torch"][1:] == ["(needs", "2.10", "or", "newer)"]


def test_check_says_the_same_to_programs(capsys):
    assert main(["check", "-i", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["problems"]) == (True, [])
    titles = {"versions", "extras", "torch", "devices", "compiler", "kernels"}
    assert told.keys() == {"ok", "problems"} | titles
    assert all(found["ok"] for title in titles for found in told[title].values())
    assert told["versions"]["torch"] == {"have": version("torch"), "need": ">=2.10", "tested": True, "ok": True}
    assert told["torch"]["backends"]["gloo"]
    assert told["devices"]["cpu"]["usable_cores"] >= 1
    assert told["kernels"]["adam"]["status"] in ("native", "buildable", "reference")
    assert told["kernels"]["adam"]["why"]


@pytest.fixture
def versions(monkeypatch):
    """Versions by name that stand for what is installed; the others are new enough."""
    versions = {"torch-booster": "0.1.0"}
    monkeypatch.setattr(check, "_version", lambda name: versions.get(name, "99.0"))
    return versions


def test_check_fails_where_something_is_missing(capsys, versions):
    versions |= {"torch": "2.9.1", "tqdm": None}
    assert main(["check", "-i"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (
        "PROBLEMS: torch 2.9.1 is too old (pip install 'torch>=2.10'); tqdm is not installed (pip install 'tqdm')"
    )
    assert "  torch            2.9.1 (needs 2.10 or newer): TOO OLD" in lines
    assert "  tqdm             MISSING" in lines


def test_what_fails_is_told_to_programs(capsys, versions):
    versions |= {"torch": "2.9.1", "transformers": "4.57"}
    assert main(["check", "-i", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert told["problems"] == ["torch 2.9.1 is too old (pip install 'torch>=2.10')"]
    assert not told["versions"]["torch"]["ok"]
    assert told["versions"]["tqdm"]["ok"]
    assert not told["extras"]["transformers"]["usable"]


@pytest.mark.parametrize(("have", "is_tested"), [("2.10.0", True), ("2.14.1+cu130", True), ("2.15.0", False)])
def test_a_newer_torch_is_no_problem_but_said(capsys, versions, have, is_tested):
    versions["torch"] = have
    assert main(["check", "-i"]) == 0
    assert ("newer than the latest tested version (2.14)" in capsys.readouterr().out) is not is_tested


def test_what_is_optional_may_be_missing(capsys, versions):
    versions |= {"transformers": "4.57.1", "matplotlib": None}
    assert main(["check", "-i"]) == 0
    said = capsys.readouterr().out
    assert "transformers     4.57.1 is too old (optional: pip install 'torch-booster[hf]')" in said
    assert "matplotlib       not installed (optional: pip install 'torch-booster[plot]')" in said


def test_another_version_is_installed_than_the_one_that_runs(capsys, versions):
    versions["torch-booster"] = "0.0.9"
    assert main(["check", "-i"]) == 1
    assert "torch-booster 0.0.9 is installed (install again" in capsys.readouterr().out


def test_python_is_looked_at(capsys, monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.9.2")
    assert main(["check", "-i"]) == 1
    assert "Python 3.9.2 is too old" in capsys.readouterr().out.splitlines()[-1]


WITHOUT_DISTRIBUTED = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":  # by these it finds out how torch was built
            for part in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
                vars(sys.modules["torch._C"]).pop(part, None)

sys.meta_path.insert(0, Hidden())
import booster
from booster.cli import main

print(main(["check", "-i", "--comm"]))
try:
    booster.Booster
except ImportError as error:
    print(error)
"""


def test_check_without_distributed():
    said = subprocess.check_output([sys.executable, "-c", WITHOUT_DISTRIBUTED], text=True, timeout=120)
    *report, code, error = said.splitlines()
    assert "  backends         MISSING" in report
    missing = "this torch was built without torch.distributed (install one from pytorch.org)"
    assert report[-1] == f"PROBLEMS: {missing}; two processes can't communicate: {missing}"
    assert code == "1"
    assert error == "torch was built without torch.distributed: install one from pytorch.org that has it"


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    find_toolchain.cache_clear()
    yield
    find_toolchain.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_check_where_compiled_kernels_are_insisted_on(capsys, monkeypatch):
    monkeypatch.setenv("BOOSTER_KERNELS", "native")
    assert main(["check", "-i"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "BOOSTER_KERNELS=native requires kernel adam, which is unavailable (CXX='no-such-compiler'" in last


@pytest.mark.usefixtures("no_compiler")
def test_check_without_a_compiler(capsys):
    assert main(["check", "-i"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [compiler] = [line for line in lines if line.startswith("  c++ ")]
    assert "no usable compiler: CXX='no-such-compiler' was not found" in compiler


def test_check_with_a_setting_that_is_unknown(capsys, monkeypatch):
    monkeypatch.setenv("BOOSTER_KERNELS", "quick")
    assert main(["check", "-i", "--json"]) == 1
    assert "BOOSTER_KERNELS='quick' is unknown" in json.loads(capsys.readouterr().out)["problems"][0]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_check_of_nothing_says_what_to_write(capsys, options):
    assert main(["check", *options]) == 2
    said = capsys.readouterr()
    assert "give -i to check the installation" in said.err
    assert not said.out


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_no_time_to_communicate(capsys, seconds):
    assert main(["check", "--comm", "--comm-timeout", seconds]) == 2
    assert f"--comm-timeout={float(seconds):g}" in capsys.readouterr().err


def requirement(text):
    name, _, least = text.partition(",")[0].partition(">=")
    name = name.partition("[")[0]  # ray[train]
    return name, tuple(int(part) for part in least.split(".")) if least else None


def test_check_knows_the_projects_dependencies():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dict(map(requirement, project["dependencies"])) == check.REQUIRED
    assert requirement(f"python{project['requires-python']}")[1] == check.PYTHON
    optional = project["optional-dependencies"]
    extras = {name: dict(map(requirement, needed)) for name, needed in optional.items()}
    for name in ("test", "dev", "docs", "examples"):  # for those who work on the project
        del extras[name]
    assert extras == check.EXTRAS


def test_check_knows_what_was_tested():
    [tested] = re.findall(r"works with torch 2\.10 to (\S+)\.", (ROOT / "constraints.txt").read_text())
    assert tuple(map(int, tested.split("."))) == check.NEWEST_TESTED_TORCH


@pytest.mark.parametrize(
    ("built_for", "driver", "works"),
    [
        (None, (12, 4), True),
        ("12.8", None, True),
        ("12.8", (12, 2), True),
        ("12.8", (13, 0), True),
        ("13.0", (12, 8), False),
        ("12.6", (11, 8), False),
    ],
)
def test_drivers_and_builds_of_torch(built_for, driver, works):
    problem = driver_problem(built_for, driver)
    assert (problem is None) is works
    if not works:
        assert f"built for CUDA {built_for}" in problem
        assert f"up to {driver[0]}.{driver[1]}" in problem


@pytest.mark.parametrize(
    ("capability", "architectures", "works"),
    [
        ((8, 0), ["sm_75", "sm_80"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((7, 0), ["sm_75", "sm_90"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((12, 0), ["sm_90a", "sm_100"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 1), ["sm_90a"], False),
        ((12, 1), ["sm_120"], True),
        ((7, 0), [], True),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_devices_and_builds_of_torch(capability, architectures, works):
    assert can_run_on(capability, architectures) is works


def properties(major, minor):
    return SimpleNamespace(name="H100", total_memory=80 * 2**30, major=major, minor=minor)


def test_devices_that_this_build_cannot_use(monkeypatch):
    monkeypatch.setattr(check, "device_type", lambda: "cuda")
    monkeypatch.setattr(check, "num_devices", lambda: 2)
    monkeypatch.setattr(check, "_cuda_driver", lambda: (12, 4))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties(9 - 2 * index, 0))
    build, first, second = accelerators()
    assert build.text == "torch is built for CUDA 12.8, the driver supports up to 12.4"
    assert (build.data["count"], build.data["driver"], build.problem) == (2, "12.4", None)
    assert (first.name, first.text, first.problem) == ("cuda:0", "H100, 80.0 GiB, capability 9.0", None)
    assert second.text.endswith("NOT SUPPORTED")
    assert "cuda:1 (H100) has capability 7.0, but this torch was built for sm_80, sm_90" in second.problem


@pytest.mark.parametrize(
    ("built_for", "driver", "text"),
    [
        (None, None, "none, this torch is a build without CUDA"),
        (None, (12, 4), "none, this torch is a build without CUDA; the machine has a driver for CUDA 12.4"),
        ("12.8", None, "torch is built for CUDA 12.8, no driver is installed; no device can be used"),
        (
            "13.0",
            (12, 4),
            "torch is built for CUDA 13.0, the driver supports up to 12.4: TOO OLD; no device can be used",
        ),
    ],
)
def test_machines_without_a_usable_device(monkeypatch, built_for, driver, text):
    monkeypatch.setattr(check, "device_type", lambda: "cpu")
    monkeypatch.setattr(check, "_cuda_driver", lambda: driver)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", None)
    [build] = accelerators()
    assert build.text.startswith(text)
    assert (build.problem is not None) is text.endswith("TOO OLD; no device can be used")
