"""The tests marked gpu pass on the simulated device, with several devices: those that need two or four run, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_cuda import device

TESTS = Path(__file__).parents[1]
# tests/multi/test_shared_gpu.py is the same as the one that is left out, with several ranks on one simulated device.
FILES = sorted(path.name for path in (TESTS / "gpu").glob("test_*.py") if path.name != "test_shared_gpu.py")
# What only a GPU has.
SKIPPED = {"test_cuda_smoke.py": r"this device can't multiply"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_tests_of_gpus_pass(name):
    if (reason := device.problem()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "simulated_cuda", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"gpu/{name}"]
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2_000:]
    assert re.search(r"\d+ passed", run.stdout), run.stdout
    skipped = [line for line in run.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(re.search(SKIPPED.get(name, "nothing"), line) for line in skipped), skipped
