"""What tests on a GPU have in common: a group for each module, fp32 without TF32, no faults of a simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_groups import group_of
from simulated_cuda import device, reports


@pytest.fixture(autouse=True)
def _fp32_means_fp32() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank, for all tests of a module: NCCL takes a second to begin."""
    with group_of(0, 1, tmp_path_factory.mktemp("group") / "store"):
        yield


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    if not device.is_installed():
        yield
        return
    with reports.recording() as record:
        yield
        device.settle()
    faults = record.faults()
    if faults:
        pytest.fail("the simulated device reports:\n" + "\n".join(faults), pytrace=False)
