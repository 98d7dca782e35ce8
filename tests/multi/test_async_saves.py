"""Saves in the background: what is written is the moment of the call, and no failure is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW

from booster.checkpoint_io import GeneralCheckpointIO, parallel
from booster.checkpoint_io.layout import MODEL, save_target
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.saving import async_save, save
from booster.checkpoint_io.saving.part import model_part
from booster.checkpoint_io.saving.save import Saver, SaveRequest
from booster.checkpoint_io.storage import Storage
from booster.device import current_device
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper, TensorSlice

pytestmark = pytest.mark.on_device


class _Gate(Storage):
    """Holds back every write until the gate is opened, and may then fail."""

    def __init__(self, fails=False):
        self.opened = threading.Event()
        self.fails = fails

    def write_at(self, file, data, offset):
        assert self.opened.wait(30)
        if self.fails:
            raise OSError(28, "No space left on device", str(file.path))
        super().write_at(file, data, offset)


def _wrapped(seed=0):
    torch.manual_seed(seed)
    is_primary = dist.get_rank() == 0
    model = ModelWrapper(nn.Linear(601, 500).to(current_device()), is_primary=is_primary)
    optimizer = OptimizerWrapper(AdamW(model.parameters()), model)
    model(torch.ones(1, 601, device=current_device())).sum().backward()
    optimizer.step()
    return model, optimizer


def _tensors(model, optimizer):
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found | {part.name: part.tensor.clone() for part in optimizer.checkpoint_state().slices()}


def _overwrite(model, optimizer, value):
    with torch.no_grad():
        for part in [*model.tensor_slices(), *optimizer.checkpoint_state().slices()]:
            part.tensor.fill_(value)


def _assert_loads(expected, path):
    model, optimizer = _wrapped(5)
    io = GeneralCheckpointIO()
    io.load_model(model, path)
    io.load_optimizer(optimizer, path)
    found = _tensors(model, optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@distributed(world_size=[1, 2])
def test_training_goes_on_while_the_moment_of_the_call_is_written(tmp_path):
    io = GeneralCheckpointIO(storage=_Gate())
    model, optimizer = _wrapped()
    expected = _tensors(model, optimizer)
    io.save_model(model, tmp_path / "c", shard=True, use_async=True)
    io.save_optimizer(optimizer, tmp_path / "c", shard=True, use_async=True)
    assert not (tmp_path / "c").exists()
    for value in range(1, 1001):
        _overwrite(model, optimizer, float(value)) if value % 50 == 0 else None
    dist.all_reduce(torch.ones(1, device=current_device()))  # collectives go on beside the save
    io.storage.opened.set()
    io.wait()
    _assert_loads(expected, tmp_path / "c")


@distributed(world_size=[1, 2])
def test_a_third_save_waits_for_memory_and_all_are_whole(tmp_path):
    io = GeneralCheckpointIO()
    model, optimizer = _wrapped()
    expected = []
    for number in range(5):
        _overwrite(model, optimizer, float(number))
        expected.append(_tensors(model, optimizer))
        io.save_model(model, tmp_path / f"c{number}", shard=True, use_async=True)
        io.save_optimizer(optimizer, tmp_path / f"c{number}", shard=True, use_async=True)
    io.wait()
    for number, tensors in enumerate(expected):
        _assert_loads(tensors, tmp_path / f"c{number}")


@distributed(world_size=2)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("collect", ["wait", "save", "load"])
def test_a_failure_of_one_rank_reaches_all_at_the_next_call(tmp_path, failing, collect):
    io = GeneralCheckpointIO(storage=_Gate(fails=dist.get_rank() == failing))
    io.storage.opened.set()
    model, _ = _wrapped()
    io.save_model(model, tmp_path / "c", shard=True, use_async=True)
    calls = {
        "wait": io.wait,
        "save": lambda: _until_it_raises(lambda: io.save_model(model, tmp_path / "d", shard=True, use_async=True)),
        "load": lambda: io.load_model(model, tmp_path / "c"),
    }
    with pytest.raises(CheckpointError, match="No space left on device"):
        calls[collect]()
    dist.barrier()
    assert [name for name in os.listdir(tmp_path) if name != "d"] == []
    if collect == "wait":
        io.wait()  # raised once


def _until_it_raises(save):
    for _ in range(4):
        save()


class _SlowBackground(_Gate):
    """Holds back what is written in the background alone."""

    def write_at(self, file, data, offset):
        if threading.current_thread() is threading.main_thread():
            self.opened.set()  # a save that overtakes the one in the background lets it finish last
            Storage.write_at(self, file, data, offset)
        else:
            super().write_at(file, data, offset)


@distributed(world_size=[1, 2])
def test_a_synchronous_save_follows_those_before_it(tmp_path):
    io = GeneralCheckpointIO(storage=_SlowBackground())
    model, optimizer = _wrapped()
    io.save_model(model, tmp_path / "c", shard=True, use_async=True)
    _overwrite(model, optimizer, 3.0)
    expected = _tensors(model, optimizer)
    timer = threading.Timer(0.2, io.storage.opened.set)
    timer.start()
    io.save_model(model, tmp_path / "c", shard=True)
    timer.join()
    io.save_optimizer(optimizer, tmp_path / "c", shard=True)
    io.wait()
    _assert_loads(expected, tmp_path / "c")


@distributed(world_size=2)
def test_a_scheduler_may_follow_into_the_directory(tmp_path):
    io = GeneralCheckpointIO(storage=_SlowBackground())
    model, optimizer = _wrapped()
    io.save_model(model, tmp_path / "c", shard=True, use_async=True)
    timer = threading.Timer(0.2, io.storage.opened.set)
    timer.start()
    io.save_lr_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), tmp_path / "c" / "scheduler.json")
    timer.join()
    io.load_model(model, tmp_path / "c")


_ENDS_AT_ONCE = """
import sys, torch
from booster import Booster
booster = Booster(device="cpu")
model, *_ = booster.boost(torch.nn.Linear(601, 500))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(7)
booster.save(sys.argv[1], model, use_async=True)
"""


@pytest.mark.slow
def test_a_process_that_ends_waits_for_its_save(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", _ENDS_AT_ONCE, str(tmp_path / "c")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    model = ModelWrapper(nn.Linear(601, 500))
    GeneralCheckpointIO().load_model(model, tmp_path / "c")
    assert all(bool((tensor == 7).all()) for tensor in model.state_dict().values())


@distributed(world_size=2)
def test_a_rank_that_cannot_copy_its_tensors_is_named_at_the_next_call(tmp_path):
    io = GeneralCheckpointIO()
    model, _ = _wrapped()

    def fail(*_):
        raise MemoryError("no memory for the copies")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("booster.checkpoint_io.saving.async_save.read_range", fail)
            patch.setattr("booster.checkpoint_io.saving.async_save._start_async_copy", lambda *_: False)
        io.save_model(model, tmp_path / "c", shard=True, use_async=True)
        with pytest.raises(CheckpointError, match=r"rank 1 failed.*no memory|background failed: no memory"):
            io.wait()
    dist.barrier()
    assert os.listdir(tmp_path) == []
    io.save_model(model, tmp_path / "c", shard=True, use_async=True)
    io.wait()


class _HeldSlices(ModelWrapper):
    """One replicated tensor, of which rank 1 has a copy or not."""

    def __init__(self, *, has_copy):
        super().__init__(nn.Module())
        tensor = torch.arange(2**19, dtype=torch.float32)
        primary = dist.get_rank() == 0
        self.held = [TensorSlice.full("w", tensor, primary=primary)] if has_copy or primary else []

    def tensor_slices(self):
        return self.held

    def tied_names(self):
        return {}


def _noting(calls, function):
    def noted(*args):
        calls.append(function.__name__)
        return function(*args)

    return noted


def _save_counted(saver, model, path, *, use_async):
    """Returns the exchanges of a save until its tensors may be modified."""
    exchanges = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_equal", "all_gather_bytes", "raise_on_all_ranks"):
            for module in (save, async_save, parallel):
                if hasattr(module, name):
                    patch.setattr(module, name, _noting(exchanges, getattr(module, name)))
        target = save_target(path, MODEL, shard=True)
        saver.save(lambda: SaveRequest(parts=[model_part(model, target)]), "saving", use_async=use_async)
    return exchanges


@distributed(world_size=2)
@pytest.mark.parametrize("use_async", [True, False])
def test_a_save_like_one_before_agrees_by_one_exchange_and_a_change_on_one_rank_is_planned_anew(tmp_path, use_async):
    saver = Saver(CheckpointGroup(), Storage())
    has_copy, lone = _HeldSlices(has_copy=True), _HeldSlices(has_copy=False)
    found = []
    for number, model in enumerate((has_copy, has_copy, lone, lone, has_copy, has_copy)):
        found.append(_save_counted(saver, model, tmp_path / str(number), use_async=use_async))
        saver.wait()
    assert [exchanges == ["all_gather_equal"] for exchanges in found] == [False, True, False, True, False, True]
    assert found[2][:2] == ["all_gather_equal", "all_gather_bytes"]  # rank 0 proposed a plan, which doesn't hold
    assert found[4][0] == "all_gather_equal"
    assert "all_gather_bytes" not in found[4]  # the plan is known, but rank 0 proposed the other one
    for number in range(6):
        tensors = load_file(tmp_path / str(number) / "model.safetensors")
        assert torch.equal(tensors["w"], lone.held[0].tensor if lone.held else torch.arange(2**19).float())


@distributed(world_size=2)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_save_that_one_rank_cannot_prepare_is_an_error_on_all(tmp_path, failing, is_known):
    saver = Saver(CheckpointGroup(), Storage())
    model = _HeldSlices(has_copy=True)
    if is_known:
        _save_counted(saver, model, tmp_path / "known", use_async=True)

    def prepare():
        if dist.get_rank() == failing:
            raise ConfigError("no name")
        return SaveRequest(parts=[model_part(model, save_target(tmp_path / "new", MODEL, shard=True))])

    with pytest.raises(ConfigError, match="no name"):
        saver.save(prepare, "saving", use_async=True)
    saver.wait()
    assert os.listdir(tmp_path) == (["known"] if is_known else [])
    _save_counted(saver, model, tmp_path / "new", use_async=False)
