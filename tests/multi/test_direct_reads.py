"""Reads past the page cache of several ranks: each byte once per host, and one rank's failure on all of them."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.layout import MODEL
from booster.checkpoint_io.loading import direct_reads, fill
from booster.checkpoint_io.loading.fill import read_slices_on_all_ranks
from booster.checkpoint_io.loading.reader import open_checkpoint
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.storage import Storage
from booster.comm import shared_blocks
from booster.errors import CheckpointError
from booster.interface import ModelWrapper, TensorSlice
from booster.kernels.checksum import crc32

MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT is Linux's")


class ColdStorage(Storage):
    """Takes every file for one that is not cached."""

    def is_cached(self, file):
        """Returns False."""
        return False


def _small_cells():
    return (
        patch.object(direct_reads, "MAX_CELL_BYTES", 16384),
        patch.object(direct_reads, "_MIN_CELL_BYTES", 16384),
        patch.object(fill, "MIN_DIRECT_BYTES", 0),
    )


def _tensors():
    torch.manual_seed(3)
    return {"all": torch.randn(100, 999), "parts": torch.randn(60_000), "rank 0": torch.randn(20_001)}


def _save(tensors, path):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    GeneralCheckpointIO().save_model(module, path)


def _slices(tensors):
    """Returns what every rank needs: one tensor, a part of another, and a third on one rank alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {"all": torch.zeros(100, 999), "rank 0": torch.zeros(20_001)}
    slices = [(name, TensorSlice.full(name, tensor, primary=True)) for name, tensor in found.items()]
    span = (rank * 60_000 // size, (rank + 1) * 60_000 // size)
    found["parts"] = torch.zeros(span[1] - span[0])
    part = TensorSlice(
        name="parts",
        dtype=torch.float32,
        global_shape=(60_000,),
        box=((0, 60_000),),
        span=span,
        tensor=found["parts"],
        primary=True,
    )
    expected = tensors | {"parts": tensors["parts"][span[0] : span[1]]}
    return [("parts", part), slices[0], *([slices[1]] if rank == 0 else [])], found, expected


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("case", ["checksums", "structure", "two hosts", "not attached", "scattered pages"])
def test_each_rank_gets_what_it_needs(tmp_path, case):
    tensors = _tensors()
    _save(tensors, tmp_path / "m.safetensors")
    slices, found, expected = _slices(tensors)
    host = f"host {dist.get_rank() // 2}" if case == "two hosts" else None
    attach = shared_blocks._attach

    def refuse(*arguments):
        return None if case == "not attached" and dist.get_rank() == 1 else attach(*arguments)

    advice = 9999 if case == "scattered pages" and dist.get_rank() == 1 else shared_blocks._MADV_COLLAPSE
    cells, smallest, least = _small_cells()
    with (
        open_checkpoint(ColdStorage(), tmp_path / "m.safetensors", MODEL) as stored,
        patch.object(shared_blocks, "_attach", refuse),
        patch.object(shared_blocks, "_MADV_COLLAPSE", advice),
        cells,
        smallest,
        least,
    ):
        ranks = CheckpointGroup(host=host)
        read_slices_on_all_ranks(stored, slices, ranks, "loading", verifies=case != "structure")
        shared = ranks.share_blocks(direct_reads._NUM_BLOCKS, 16384)
    if case in ("not attached", "scattered pages"):
        assert shared is None or not shared.are_huge
    for name, _ in slices:
        assert torch.equal(found[name], expected[name]), name


def _num_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@distributed(world_size=[2, 3])
def test_the_disk_reads_each_byte_once_per_host(tmp_path):
    path = tmp_path / "m.safetensors"
    tensors = {f"t{index}": torch.full((1000, 1001), float(index)) for index in range(12)}
    is_cold = torch.zeros(1)
    _save(tensors, path)
    if dist.get_rank() == 0:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with Storage().open_regular(path) as opened:
            is_cold[0] = not Storage().is_cached(opened) and Storage().open_direct(opened) is not None
    dist.broadcast(is_cold, 0)
    if not is_cold:
        pytest.skip("this file system keeps its files in memory, or can't go past the page cache")
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    before = _num_read()
    with open_checkpoint(Storage(), path, MODEL) as stored:
        slices = [(name, TensorSlice.full(name, tensor, primary=True)) for name, tensor in found.items()]
        read_slices_on_all_ranks(stored, slices, CheckpointGroup(), "loading", verifies=True)
    total = torch.tensor([_num_read() - before])
    dist.all_reduce(total)
    assert 0 <= int(total) - path.stat().st_size < 2 * MIB * dist.get_world_size()  # heads, read ahead
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


class CachedStorage(Storage):
    """Takes every file for one that is cached."""

    def is_cached(self, file):
        """Returns True."""
        return True


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("case", ["same", "other slices", "not verified on one", "a host each"])
def test_ranks_of_a_host_share_the_checksums_of_cached_files(tmp_path, case):
    path, rank, size = tmp_path / "m.safetensors", dist.get_rank(), dist.get_world_size()
    tensors = {f"t{index}": torch.full((100, 99), float(index)) for index in range(12)}
    _save(tensors, path)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    if case == "other slices" and rank == 0:
        del found["t0"]
    slices = [(name, TensorSlice.full(name, tensor, primary=True)) for name, tensor in found.items()]
    num_checked = 0

    def count(data, before=0):
        nonlocal num_checked
        num_checked += len(data)
        return crc32(data, before)

    host = f"host {rank}" if case == "a host each" else None
    verifies = case != "not verified on one" or rank > 0
    num_bytes = sum(tensor.nbytes for tensor in found.values())
    with (
        patch.object(fill, "MIN_DIRECT_BYTES", 0),
        patch.object(fill, "BATCH_BYTES", 2 * 100 * 99 * 4),
        patch.object(fill, "crc32", count),
        open_checkpoint(CachedStorage(), path, MODEL) as stored,
    ):
        read_slices_on_all_ranks(stored, slices, CheckpointGroup(host=host), "loading", verifies=verifies)
    assert num_checked == (num_bytes // size if case == "same" else num_bytes * verifies)
    assert all(torch.equal(found[name], tensors[name]) for name in found)
    dist.barrier()
    if rank == 0:  # what this rank verifies, or another one
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    with (
        patch.object(fill, "MIN_DIRECT_BYTES", 0),
        patch.object(fill, "BATCH_BYTES", 2 * 100 * 99 * 4),
        open_checkpoint(CachedStorage(), path, MODEL) as stored,
        pytest.raises(CheckpointError, match="is damaged"),
    ):
        read_slices_on_all_ranks(stored, slices, CheckpointGroup(host=host), "loading", verifies=verifies)


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(200, 100), nn.Linear(100, 300)

    def forward(self, inputs):
        return self.second(self.first(inputs))


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("damage", ["a byte", "the end"])
def test_damage_in_the_middle_leaves_the_model_incomplete_on_all_ranks(tmp_path, damage):
    torch.manual_seed(0)
    model, path = ModelWrapper(_Model(), is_primary=dist.get_rank() == 0), tmp_path / "m.safetensors"
    io = GeneralCheckpointIO(storage=ColdStorage())
    io.save_model(model, path)
    good = path.read_bytes()
    dist.barrier()
    cells, smallest, least = _small_cells()
    with cells, smallest, least:
        with pytest.raises(CheckpointError, match=r"is damaged|too early"), _damaged_after_check(path, good, damage):
            io.load_model(model, path)
        dist.barrier()
        with pytest.raises(CheckpointError, match="this model is incomplete"):
            model(torch.zeros(1, 200))
        if dist.get_rank() == 0:
            path.write_bytes(good)
        dist.barrier()
        io.load_model(model, path)
    model(torch.zeros(1, 200))


@contextmanager
def _damaged_after_check(path, good, damage):
    """Damages the file once its structure has been checked: before, the load would change nothing."""
    middle = len(good) // 2
    bad = good[:middle] if damage == "the end" else good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    real = fill._blocks_to_fill

    def find_blocks(*arguments, **options):
        if dist.get_rank() == 0:
            path.write_bytes(bad)
        return real(*arguments, **options)

    with patch.object(fill, "_blocks_to_fill", find_blocks):
        yield
