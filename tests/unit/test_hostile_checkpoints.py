"""Names that lead elsewhere, links, special files and pickles: refused, and nothing is opened, imported or run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 300  # where a pipe blocks
MAX_SECONDS = 20.0  # of one case, on a busy machine


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What happened in a process of its own: an audit hook stays."""
    root = tmp_path_factory.mktemp("hostile") / "cases"
    done = subprocess.run(
        [sys.executable, "-m", "oracles.hostile", str(root)],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": str(TESTS / "cases"), "PYTHONWARNINGS": "ignore"},
        timeout=TIMEOUT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _check_nothing_else_happened(what, result):
    assert result["outside"] == [], what
    assert result["events"] == [], what
    assert result["seconds"] < MAX_SECONDS, what


def _check_refused(what, result):
    assert result["error"] is not None, f"{what} was loaded"
    assert result["error"].startswith("CheckpointError: "), f"{what}: {result['error']}"
    assert not result["is_changed"], what
    _check_nothing_else_happened(what, result)


def test_hostile_names_are_refused(results):
    names = results["names"]
    assert len(names) >= 3 * 60
    for what, result in names.items():
        _check_refused(what, result)


def test_links_and_special_files(results):
    links = results["links"]
    assert sum(not result["may_load"] for result in links.values()) >= 15
    for what, result in links.items():
        if result["may_load"]:
            assert result["error"] is None, f"{what}: {result['error']}"
            assert result["is_exact"], what
            _check_nothing_else_happened(what, result)
        else:
            _check_refused(what, result)


def test_hostile_pickles_are_refused_under_every_suffix(results):
    pickles = results["pickles"]
    assert len(pickles) >= 5 * 30
    for what, result in pickles.items():
        _check_refused(what, result)
    assert not results["ran"]


def test_the_hook_sees_a_pickle_that_runs_and_a_name_that_leads_out(results):
    control = results["control"]
    assert control["ran"]
    assert {"pickle.find_class", "os.system"} <= set(control["events"])
    assert [Path(name).name for name in control["outside"]] == ["outside.safetensors"]
