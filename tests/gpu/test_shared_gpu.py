"""Two to four ranks on one GPU, which NCCL refuses: every plugin trains as one process. Run by benchmarks/gpu_suite.py.

The backend is `harness.shared_gpu`; tests/multi/test_shared_gpu.py is the same on the simulated device. With
TORCH_CUDA_SANITIZER=1 torch looks for accesses on two streams without an order.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_cases import PARALLEL, check_collectives
from harness import distributed, shared_gpu

from booster.device import device_type

DEVICE = "shared_gpu"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_type() != "cuda", reason="needs a CUDA device, and torch sees none"),
]


@distributed(2, device=DEVICE)
def test_collectives():
    assert dist.get_backend() == shared_gpu.BACKEND
    check_collectives(torch.device("cuda", 0))


@pytest.mark.parametrize("name", PARALLEL)
def test_ranks_train_as_one_process(name: str) -> None:
    PARALLEL[name](DEVICE)
