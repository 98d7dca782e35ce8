"""The program that runs a script as a rank: like `python script.py`, and a report where it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import booster.cli.run

WORKER = str(Path(booster.cli.run.__file__).with_name("worker.py"))


def run(arguments, cwd, error_file=None):
    environment = os.environ | ({"TORCHELASTIC_ERROR_FILE": str(error_file)} if error_file else {})
    return subprocess.run(
        [sys.executable, WORKER, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


SHOW = """\
import sys, __main__
print(sys.argv, __name__, __file__, sys.path[0], __spec__, __main__.__dict__ is globals(), "torch" in sys.modules)
"""


def test_a_script_sees_what_it_sees_under_python(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "show.py").write_text(SHOW)
    arguments = ["sub/show.py", "--lr", "1"]
    expected = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    done = run(arguments, tmp_path)
    assert done.stdout == expected.stdout != ""
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_sees_what_it_sees_under_python(tmp_path):
    (tmp_path / "show.py").write_text("import sys\nprint(sys.argv, __name__, sys.path[0], __spec__.name)\n")
    arguments = ["-m", "show", "x"]
    expected = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run(arguments, tmp_path).stdout == expected.stdout != ""


def test_an_error_is_shown_reported_and_free_of_our_frames(tmp_path):
    (tmp_path / "bad.py").write_text("def f():\n    raise ValueError('mine')\nf()\n")
    done = run(["bad.py"], tmp_path, tmp_path / "error.json")
    stack = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert done.returncode == 1
    assert done.stderr == stack
    assert stack.startswith("Traceback")
    assert stack.endswith("ValueError: mine\n")
    assert "worker.py" not in stack


def test_a_report_that_can_not_be_written_whole_is_not_written(tmp_path):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\nraise ValueError('mine')\n"
    (tmp_path / "bad.py").write_text(limit)
    done = run(["bad.py"], tmp_path, tmp_path / "error.json")
    assert done.stderr.endswith("ValueError: mine\n")
    assert not (tmp_path / "error.json").exists()  # torch's launcher would fail at a part of it


def test_a_failing_module_shows_its_frames_only(tmp_path):
    (tmp_path / "bad.py").write_text("raise ValueError('mine')\n")
    done = run(["-m", "bad"], tmp_path)
    assert done.stderr.endswith("ValueError: mine\n")
    assert "runpy" not in done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "stderr"),
    [("sys.exit()", 0, ""), ("sys.exit(0)", 0, ""), ("sys.exit(7)", 7, ""), ("sys.exit('why')", 1, "why\n")],
)
def test_exit_codes(tmp_path, ending, code, stderr):
    (tmp_path / "end.py").write_text(f"import sys\n{ending}\n")
    done = run(["end.py"], tmp_path, tmp_path / "error.json")
    assert (done.returncode, done.stderr) == (code, stderr)
    assert (tmp_path / "error.json").exists() == (code != 0)


def test_atexit_functions_run_and_then_nothing_waits(tmp_path):
    # The object's destructor would wait for ever, as a process group with queued collectives does for its timeout.
    (tmp_path / "end.py").write_text(
        "import atexit, signal\n"
        "class Group:\n    def __del__(self):\n        signal.pause()\n"
        "group = Group()\natexit.register(print, 'told')\nprint('partial', end='')\nraise KeyError\n"
    )
    done = run(["end.py"], tmp_path)
    assert done.returncode == 1
    assert done.stdout == "partialtold\n"
