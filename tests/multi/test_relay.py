"""On a file system that hosts share, every file is written by ranks of one host."""

from __future__ import annotations

import errno
import threading
import time

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.storage import Storage
from booster.device import current_device
from booster.errors import CheckpointError
from booster.interface import ModelWrapper, TensorSlice

pytestmark = pytest.mark.on_device


class _Writes(Storage):
    """Notes which files this rank writes tensors into, after they were created."""

    def __init__(self):
        self.written = set()
        self._lock = threading.Lock()

    def open_for_writing(self, path, *, direct=False):
        with self._lock:
            self.written.add(path.name)
        return super().open_for_writing(path, direct=direct)


class _Cut(ModelWrapper):
    """Each rank holds a span of every tensor, the last one more."""

    def tensor_slices(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        found = []
        for name, tensor in self.module.state_dict().items():
            numel = tensor.numel()
            start, stop = numel * rank // size, numel * (rank + 1) // size
            box = tuple((0, length) for length in tensor.shape)
            part = tensor.reshape(-1)[start:stop]
            found.append(
                TensorSlice(
                    name=name,
                    dtype=tensor.dtype,
                    global_shape=tuple(tensor.shape),
                    box=box,
                    span=(start, stop),
                    tensor=part,
                    primary=True,
                )
            )
        return found


def _model(cls, seed):
    torch.manual_seed(seed)
    return cls(nn.Sequential(nn.Linear(700, 500), nn.Linear(500, 700), nn.Linear(700, 33)).to(current_device()))


@distributed(world_size=[3, 4])
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("use_safetensors", [False, True])
def test_files_of_several_hosts(tmp_path, world_size, use_async, is_cut, use_safetensors):
    rank = dist.get_rank()
    host = "a" if rank < 2 else "b"
    io = GeneralCheckpointIO(storage=_Writes(), host=host)
    model = _model(_Cut, 0) if is_cut else _model(ModelWrapper, 0)
    model._is_primary = rank == 0
    io.save_model(
        model,
        tmp_path / "c",
        shard=True,
        size_per_shard=1,
        use_async=use_async,
        use_safetensors=use_safetensors,
    )
    io.wait()
    written = [None] * world_size
    dist.all_gather_object(written, (host, {name for name in io.storage.written if "-of-" in name}))
    on_a = set().union(*(names for where, names in written if where == "a"))
    on_b = set().union(*(names for where, names in written if where == "b"))
    assert on_a
    assert on_b
    assert not on_a & on_b
    other = _model(_Cut, 1) if is_cut else _model(ModelWrapper, 1)
    GeneralCheckpointIO().load_model(other, tmp_path / "c")
    for (name, expected), (_, found) in zip(_held(model, is_cut), _held(other, is_cut), strict=True):
        assert torch.equal(expected, found), name


def _held(model, is_cut):
    return [(part.name, part.tensor) for part in model.tensor_slices()] if is_cut else model.state_dict().items()


class _Full(Storage):
    """A disk that is full on one rank."""

    def __init__(self, rank):
        super().__init__()
        self._is_full = dist.get_rank() == rank

    def write_at(self, file, data, offset):
        if self._is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_at(file, data, offset)


@distributed(world_size=3)
@pytest.mark.parametrize("full_rank", [0, 2])
def test_a_write_that_fails_on_one_host_ends_the_save_on_all(tmp_path, full_rank):
    """Ranks of the other host wait for what the rank with the full disk sends."""
    io = GeneralCheckpointIO(storage=_Full(full_rank), host="a" if dist.get_rank() < 2 else "b")
    model = _model(_Cut, 0)
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="No space left on device"):
        io.save_model(model, tmp_path / "c", shard=True, size_per_shard=1)
    assert time.monotonic() - started < 60
    dist.barrier()
