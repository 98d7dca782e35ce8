"""Every wrong call is one error of ours on all ranks, says what to write instead, and changes nothing; under -O too."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from faults.mistakes.running import outcomes
from faults.wrong_calls import SNAPSHOT, difference, found_defects

ROOT = Path(__file__).parents[2]
FOLDERS = ("booster", "plugins", "checkpoint_io", "kernels")
REGENERATE = "If the new messages are right, write them: python tests/faults/wrong_calls.py --write"
# A busy machine: the same calls take some 15 s on idle cores.
SECONDS = 600

# Note [Asserts that stay]
# An assert is for a mistake of this library's own, as `python -O` leaves it out. Those that tell a type checker that
# something is there are recognised by their form. Every other one is listed here, with what has made sure of it before.
ASSERTS = {
    "booster": {},
    "plugins": {
        "self.can_be_released": "the hooks ask before they release",
        "not self._is_freed": "a block's owner drops it when it frees it",
        "tensor.device.type == 'cpu'": "blocks on a disk are made of host memory alone",
        "self.numel % unit == 0": "the search pads chunks",
        "end <= self.numel": "the search fills chunks",
        "0 <= rank < self.num_shards": "ranks come from the mesh",
        "module_of is None or len(module_of) == len(parameters)": "both come from one walk over the model",
        "tensor.dim() == 1": "blocks are flat",
        "tensor.is_contiguous()": "blocks are flat",
        "tensor.nbytes == num_bytes": "a block gives and takes one size",
        "all((shard_spec_of(after[name]).local_shape == tuple(after[name].shape) for name in held))": "specs fit",
        "group_rank(group) == self.rank(*key)": "the mesh numbers both",
        "self.layers": "plans without layers are refused before",
        "len(set(self.layers)) == len(self.layers)": "names of modules differ",
        "not nested": "units are found from the outside in",
        "not outside": "gaps are counted between units",
    },
    "checkpoint_io": {
        "starts == file.starts": "the plan computes both",
        "whence == os.SEEK_CUR": "torch's own writer calls it",
        "num_bytes == spec.num_bytes": "torch's own writer calls it",
    },
    "kernels": {
        "len(steps) == len(params)": "the optimizers make both lists",
        "is_scalar": "the loss scaler makes it",
        "tensor.device.type == 'cpu'": "the disk tier gives host memory",
        "tensor.is_contiguous()": "the disk tier gives flat blocks",
        "(address | num_bytes | offset) % ALIGNMENT == 0 or not _is_direct(descriptor)": "aligned by the disk tier",
        "offset >= 0": "offsets come from the allocator of the file",
    },
}


@pytest.mark.on_device
def test_every_wrong_call_is_refused_on_all_ranks_before_anything_changes(tmp_path):
    found = outcomes(tmp_path)
    assert len(found) >= 120
    defects = found_defects(found)
    assert not defects, "\n".join(defects)
    differs = difference(found)
    assert not differs, f"{differs}\n{REGENERATE}"


@pytest.mark.slow
def test_the_same_under_python_without_asserts():
    script = ROOT / "tests" / "faults" / "wrong_calls.py"
    command = [sys.executable, "-O", str(script), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, env=_environment())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:] + REGENERATE
    assert done.stdout.rstrip().endswith("0 problems (optimize=1)")


def test_the_kept_messages_are_one_a_line_and_of_no_machine():
    text = SNAPSHOT.read_text()
    names = [line.split(" | ")[0] for line in text.splitlines()]
    assert len(names) == len(set(names))
    for of_a_machine in (str(ROOT), "/tmp/", os.uname().nodename + " "):
        assert of_a_machine not in text
    assert not re.search(r"\b0x[0-9a-f]", text)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_assert_guards_against_a_users_mistake(folder):
    found = {ast.unparse(one.test) for path in (ROOT / folder).rglob("*.py") for one in _asserts(path)}
    assert found == set(ASSERTS[folder]), "raise an error of booster.errors in place of an assert that a user can meet"


def _asserts(path: Path) -> list[ast.Assert]:
    """Returns the asserts of a file that are more than a word to the type checker."""
    return [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Assert) and not _narrows(one)]


def _narrows(one: ast.Assert) -> bool:
    if isinstance(one.test, ast.Call):
        return isinstance(one.test.func, ast.Name) and one.test.func.id == "isinstance"
    return isinstance(one.test, ast.Compare) and ast.unparse(one.test).endswith(" is not None")


FAILING = """
from harness import distributed

@distributed(world_size=2)
def test_on_ranks():
    assert 1 == 2

def test_here():
    assert 1 == 2

def test_by_a_helper():
    from harness import run_ranks
    run_ranks(_failing, 2)

def _failing():
    assert 3 == 4
"""


@pytest.mark.slow
def test_a_failing_assert_of_a_test_fails_without_asserts_too(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    ignored = "ignore:assertions not in test modules:pytest.PytestConfigWarning"
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", ignored]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path / "test_failing.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, env=_environment())
    assert done.stdout.rstrip().splitlines()[-1].startswith("3 failed"), done.stdout[-4000:] + done.stderr[-2000:]
    assert "assert 1 == 2" in done.stdout
    assert "assert 3 == 4" in done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONOPTIMIZE"))}
