"""Every plugin trains on fake tensors of the simulated CUDA device: an operator that mixes them with others fails.

In a process of its own, as torch can't forget a device; `oracles/device_placement.py` has the cases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_cuda import device

TESTS = Path(__file__).resolve().parents[1]
# fp16; DDP, ZeRO 2, Gemini offloaded, FSDP offloaded, tp, tp x pp x dp with ZeRO and without; controls.
ONE_OF_EACH = (2, 6, 11, 14, 18, 19, 21, 35, 36, -2, -1)
NUM_CASES = 40
MAX_COMMUNICATORS = 6
# The world, an axis each (pp carries the messages to later stages), those to earlier stages, and norms over tp x pp.
COMMUNICATORS = {"tp x pp x ZeRO 1": 5, "tp x pp x DP": 6}
HAS_STATES_ON_THE_HOST = ("cpu_offload", "offload_optim_frac")


pytestmark = pytest.mark.skipif(device.problem() is not None, reason=str(device.problem()))


def _run(*numbers):
    command = [sys.executable, "-m", "oracles.device_placement", *map(str, numbers)]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _check(found):
    *trained, (_, model), (_, states) = found.items()
    for control in (model, states):
        assert "FakeTensorDeviceMismatchError" in control["error"]
    for name, result in trained:
        assert result["error"] is None, name
        is_offloaded = any(word in name for word in HAS_STATES_ON_THE_HOST)
        assert (result["offloaded"] > 1000) == is_offloaded, name  # else the step numbers of AdamW at most
        # FSDP has half of the weights and moments on a device, and eight ranks have less.
        has_little = is_offloaded or name.startswith(("tp x pp", "torch_fsdp"))
        assert (result["on_device"] < 31_000) == has_little, name
        assert (1 if "single" not in name else 0) <= result["communicators"] <= MAX_COMMUNICATORS, name
        if name in COMMUNICATORS:
            assert result["communicators"] == COMMUNICATORS[name]
        saving = result["saving"]
        assert saving["device"] <= 31_000, name  # what is converted, of a small model
        assert saving["async_host"] > saving["host"] == 8 * 2**20, name


def test_one_setting_of_each_plugin():
    found = _run(*ONE_OF_EACH)
    assert len(found) == len(ONE_OF_EACH)
    _check(found)


@pytest.mark.slow
def test_all_settings():
    found = _run()
    assert len(found) == NUM_CASES
    _check(found)
