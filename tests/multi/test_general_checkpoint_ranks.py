"""GeneralCheckpointIO on two ranks: one makes the files, both write and read, and both fail alike."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn
from torch.optim import AdamW, lr_scheduler

from booster import Booster
from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.storage import Storage
from booster.comm import all_reduce_numbers
from booster.device import current_device
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.plugins import LowLevelZeroPlugin

pytestmark = pytest.mark.on_device


class _Counts(Storage):
    """Counts the files that this rank creates, and fails at one of them."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.num_created = 0

    def create(self, path):
        self.num_created += 1
        if self.num_created == self.fails_at:
            raise OSError(28, "No space left on device", str(path))
        return super().create(path)


def _wrapped(seed, is_primary=None):
    torch.manual_seed(seed)
    is_primary = dist.get_rank() == 0 if is_primary is None else is_primary
    model = ModelWrapper(nn.Linear(3, 2).to(current_device()), is_primary=is_primary)
    optimizer = OptimizerWrapper(AdamW(model.parameters(), lr=0.5 + seed), model)
    model(torch.ones(1, 3, device=current_device())).sum().backward()
    optimizer.step()
    return model, optimizer


def _assert_equal(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


@distributed(world_size=2)
@pytest.mark.parametrize("is_sharded", [True, False])
def test_one_rank_makes_the_files_and_all_ranks_read(tmp_path, is_sharded):
    io = GeneralCheckpointIO(storage=_Counts())
    model, optimizer = _wrapped(0)
    other_model, other = _wrapped(1 + dist.get_rank())
    suffix = "" if is_sharded else ".safetensors"
    io.save_model(model, tmp_path / f"m{suffix}", shard=is_sharded)
    io.save_optimizer(optimizer, tmp_path / f"o{suffix}", shard=is_sharded)
    assert (io.storage.num_created > 0) is (dist.get_rank() == 0)
    io.load_model(other_model, tmp_path / f"m{suffix}")
    io.load_optimizer(other, tmp_path / f"o{suffix}")
    _assert_equal(other_model, model)
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


def _bytes_from_disk():
    """Returns what the kernel has read from a disk for this process."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


@distributed(world_size=2)
@pytest.mark.skipif(sys.platform != "linux", reason="what the kernel reads is counted in /proc")
def test_ranks_of_one_host_that_need_the_same_bytes_read_them_once(tmp_path):
    io = GeneralCheckpointIO()
    model = ModelWrapper(nn.ParameterList(torch.randn(2**21) for _ in range(8)), is_primary=dist.get_rank() == 0)
    io.save_model(model, tmp_path / "m", shard=True)
    if dist.get_rank() == 0:
        for path in (tmp_path / "m").iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    before = _bytes_from_disk()
    io.load_model(model, tmp_path / "m")
    (read,) = all_reduce_numbers([_bytes_from_disk() - before])
    num_bytes = 8 * 4 * 2**21
    if read < num_bytes / 2:
        pytest.skip(f"{read:.0f} of {num_bytes} bytes were read from a disk: here files stay in memory")
    assert read < 1.2 * num_bytes


@distributed(world_size=2)
def test_the_primary_slices_may_be_on_any_rank(tmp_path):
    io = GeneralCheckpointIO(storage=_Counts())
    model, optimizer = _wrapped(0, is_primary=dist.get_rank() == 1)
    io.save_model(model, tmp_path / "m", shard=True)
    io.save_optimizer(optimizer, tmp_path / "m", shard=True)
    other_model, other = _wrapped(1)
    io.load_model(other_model, tmp_path / "m")
    io.load_optimizer(other, tmp_path / "m")
    _assert_equal(other_model, model)


@distributed(world_size=2)
@pytest.mark.parametrize("is_primary", [True, False])
def test_no_writer_or_two_are_refused(tmp_path, is_primary):
    model, _ = _wrapped(0, is_primary=is_primary)
    reason = "primary 2 times, by ranks 0, 1" if is_primary else "is in no primary slice"
    with pytest.raises(CheckpointError, match=reason):
        GeneralCheckpointIO().save_model(model, tmp_path / "m", shard=True)
    assert not os.listdir(tmp_path)


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["model", "optimizer", "scheduler"])
def test_a_full_disk_on_the_writing_rank_fails_all(tmp_path, kind):
    io = GeneralCheckpointIO(storage=_Counts(fails_at=1))
    model, optimizer = _wrapped(0)
    saves = {
        "model": lambda: io.save_model(model, tmp_path / "m", shard=True),
        "optimizer": lambda: io.save_optimizer(optimizer, tmp_path / "o.safetensors"),
        "scheduler": lambda: io.save_lr_scheduler(lr_scheduler.StepLR(optimizer, 1), tmp_path / "s.json"),
    }
    with pytest.raises(CheckpointError, match="No space left on device"):
        saves[kind]()
    dist.barrier()
    assert not os.listdir(tmp_path)


@distributed(world_size=2)
def test_a_wrong_argument_fails_all(tmp_path):
    model, _ = _wrapped(0)
    (tmp_path / "m.safetensors").mkdir(exist_ok=True)
    dist.barrier()
    with pytest.raises(ConfigError, match="is a directory"):
        GeneralCheckpointIO().save_model(model, tmp_path / "m.safetensors")


@distributed(world_size=2)
@pytest.mark.parametrize("call", ["save", "save_optimizer"])
def test_what_one_rank_keeps_beside_its_states_fails_all(tmp_path, call):
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    model = nn.Linear(8, 8)
    model, optimizer, *_ = booster.boost(model, AdamW(model.parameters()))
    booster.backward(model(torch.ones(2, 8, device=booster.device)).mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        optimizer.optim.state["global"] = {"n": 1}
    saves = {
        "save": lambda: booster.save(tmp_path / "c", model, optimizer),
        "save_optimizer": lambda: booster.save_optimizer(optimizer, tmp_path / "c", shard=True),
    }
    with pytest.raises(CheckpointError, match="keeps 'global' beside"):
        saves[call]()
    optimizer.optim.state.pop("global", None)
    booster.save_optimizer(optimizer, tmp_path / "c", shard=True)  # the ranks are still in step


@distributed(world_size=2)
def test_of_plain_modules_that_differ_the_first_rank_writes_its_own(tmp_path):
    torch.manual_seed(dist.get_rank())
    io, model = GeneralCheckpointIO(), nn.Linear(3, 2)
    io.save_model(model, tmp_path / "m.safetensors")
    loaded = nn.Linear(3, 2)
    io.load_model(loaded, tmp_path / "m.safetensors")
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    assert torch.equal(loaded.weight, expected.weight)
    assert torch.equal(loaded.bias, expected.bias)


@distributed(world_size=2)
def test_a_model_that_differs_on_one_rank_is_loaded_nowhere(tmp_path):
    io = GeneralCheckpointIO()
    io.save_model(_wrapped(0)[0], tmp_path / "m.safetensors")
    model = ModelWrapper(nn.Linear(3, 2 + dist.get_rank()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="has shape"):
        io.load_model(model, tmp_path / "m.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@distributed(world_size=2)
def test_a_scheduler_comes_back_on_all_ranks(tmp_path):
    io = GeneralCheckpointIO(storage=_Counts())
    _, optimizer = _wrapped(0)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [1, 3])
    scheduler.step()
    io.save_lr_scheduler(scheduler, tmp_path / "s.json")
    assert io.storage.num_created == (dist.get_rank() == 0)
    other = lr_scheduler.MultiStepLR(_wrapped(1)[1], [1, 3])
    io.load_lr_scheduler(other, tmp_path / "s.json")
    assert other.state_dict() == scheduler.state_dict()
