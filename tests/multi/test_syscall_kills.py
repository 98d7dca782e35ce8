"""A save that is killed at any of its system calls, by strace, without a word of our own code in between."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from booster.checkpoint_io import GeneralCheckpointIO
from booster.errors import CheckpointError
from booster.interface import ModelWrapper

STRACE = shutil.which("strace")
SAVE = """
import sys, torch
from torch import nn
from booster.checkpoint_io import GeneralCheckpointIO
from booster.interface import ModelWrapper
model = ModelWrapper(nn.Linear(6, 5))
for parameter in model.parameters():
    parameter.data.fill_(float(sys.argv[2]))
GeneralCheckpointIO().save_model(model, sys.argv[1], shard=True)
"""
# What changes something on a disk, each with the number of a first call that may be killed.
CALLS = ["mkdir", "fallocate", "ftruncate", "pwrite64", "fsync", "rename", "renameat2", "unlink", "unlinkat", "rmdir"]
IN_PLACE = "import sys, torch\nfrom safetensors.torch import save_file\nvalue = float(sys.argv[2])\n" + (
    "save = {'weight': torch.full((5, 6), value), 'bias': torch.full((5,), value)}\n"
    "import os\nraw = open(sys.argv[1] + '/model.safetensors', 'r+b')\n"
    "from safetensors.torch import save as to_bytes\ndata = to_bytes(save)\n"
    "half = len(data) // 2\nos.pwrite(raw.fileno(), data[:half], 0)\nos.pwrite(raw.fileno(), data[half:], half)\n"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(STRACE is None, reason="strace is not installed"),
]


def _killed_at(script: str, directory: Path, value: float, call: str, number: int) -> bool:
    """Runs a save that dies at the `number`-th `call` below the directory's parent; False if there were fewer."""
    inject = f"inject={call}:signal=SIGKILL:when={number}"
    command = [STRACE, "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
    run = subprocess.run(
        [*command, sys.executable, "-B", "-c", script, str(directory), str(value)],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert run.returncode in (0, -9, 137), run.stderr.decode()
    return run.returncode != 0


def _value(directory: Path) -> float | None:
    """Returns the value that all elements have; None for a mixture, or where nothing loads."""
    model = ModelWrapper(nn.Linear(6, 5))
    try:
        GeneralCheckpointIO().load_model(model, directory)
    except CheckpointError:
        return None
    values = {value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()}
    return values.pop() if len(values) == 1 else None


def _old(directory: Path) -> None:
    model = ModelWrapper(nn.Linear(6, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    GeneralCheckpointIO().save_model(model, directory, shard=True)


@pytest.mark.parametrize("call", CALLS)
def test_a_kill_at_any_system_call_leaves_the_old_or_the_new(tmp_path, call):
    number, is_killed = 0, True
    while is_killed:
        number += 1
        directory = tmp_path / str(number) / "c"
        directory.parent.mkdir()
        _old(directory)
        is_killed = _killed_at(SAVE, directory, 2.0, call, number)
        assert _value(directory) in (1.0, 2.0), f"killed at {call} number {number}"
    assert _value(directory) == 2.0
    _old(directory)  # the next save works, and clears what is left
    assert _value(directory) == 1.0
    assert not [name for name in directory.parent.rglob("*") if ".booster-" in name.name or ".tmp-" in name.name]


def test_a_writer_in_place_is_caught(tmp_path):
    directory = tmp_path / "c"
    _old(directory)
    for manifest in directory.glob("*manifest*"):
        manifest.unlink()
    assert _killed_at(IN_PLACE, directory, 2.0, "pwrite64", 2)
    model = ModelWrapper(nn.Linear(6, 5))
    with pytest.raises(CheckpointError):
        GeneralCheckpointIO().load_model(model, directory)
