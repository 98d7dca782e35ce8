"""Process groups of tests on real GPUs: one rank in pytest's process, or a GPU for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from booster.device import default_backend, device_type, num_devices, set_device

HAS_GPU = device_type() == "cuda"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device, and torch sees none")
needs_two = pytest.mark.skipif(num_devices() < 2, reason="needs two CUDA devices")
needs_four = pytest.mark.skipif(num_devices() < 4, reason="needs four CUDA devices")


@contextmanager
def group_of(rank: int, size: int, store: Path) -> Iterator[None]:
    """Makes the default group on the devices' own backend."""
    device = set_device(rank) if HAS_GPU else None
    dist.init_process_group(
        default_backend(device_type()),
        store=dist.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        device_id=device,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def group_of_devices(folder: Path) -> Iterator[None]:
    """Puts a group on the devices' own backend in the place of the harness's, which is gloo's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.set_float32_matmul_precision("highest")
    with group_of(rank, size, folder / "store"):
        yield
