"""The device module on a machine without an accelerator, and with one that is pretended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from harness import run_ranks

from booster import device
from booster.errors import ConfigError


@pytest.fixture
def cpu_only(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.fixture
def two_accelerators(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


def test_cpu(cpu_only):
    assert device.device_type() == "cpu"
    assert device.current_device() == device.set_device(5) == torch.device("cpu")
    assert device.num_devices() == 1
    device.synchronize()


def _allocate():
    device.reset_peak_memory()
    before = device.memory_allocated()
    block = torch.ones(16 * 2**20)
    assert device.memory_allocated() - before > 0.9 * block.nbytes
    assert device.max_memory_allocated() >= before + 0.9 * block.nbytes


def test_cpu_memory_is_the_process_own():
    # In a process of its own: here malloc may hold memory that an earlier test gave back, and take the block from it.
    run_ranks(_allocate, 1, fresh=True)


def test_backends():
    assert device.default_backend("cpu") == "gloo"
    assert device.default_backend("cuda") == ("nccl" if torch.distributed.is_nccl_available() else "gloo")


def test_each_rank_needs_its_own_accelerator(two_accelerators):
    assert device.set_device(1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"local_rank=2.*2 cuda device"):
        device.set_device(2)
    assert two_accelerators == [1]


# Allocates and frees 64 MiB in blocks, again and again, as activations are; prints the page faults of a round, and the
# MiB that are given back after.
ROUNDS = """
import resource, torch
from booster import Booster, get_accelerator
from booster.device import memory_allocated

Booster(device="cpu").boost(torch.nn.Linear(1, 1))
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def round():
    blocks = [torch.ones(2**20) for _ in range(16)]

for _ in range(3):
    round()
before = faults()
for _ in range(4):
    round()
print((faults() - before) // 4)
held = memory_allocated()
get_accelerator().empty_cache()
print((held - memory_allocated()) // 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(device._GLIBC, "mallopt"), reason="of glibc's allocator")
@pytest.mark.parametrize("variable", [None, "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_freed_memory_waits_for_the_next_step(variable):
    given = {"MALLOC_TRIM_THRESHOLD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}
    clean = {name: value for name, value in os.environ.items() if name not in given and not name.startswith("MALLOC_")}
    environment = clean | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if variable is not None:
        environment[variable] = given[variable]
    command = [sys.executable, "-c", ROUNDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    num_faults, given_back = map(int, done.stdout.split())
    if variable is None:
        assert num_faults < 100
        assert given_back > 48
    else:
        assert num_faults > 10_000
        assert given_back < 16
