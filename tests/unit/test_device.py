"""The device module on a machine without an accelerator, and with one that is pretended."""

from __future__ import annotations

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
