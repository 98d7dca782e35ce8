"""CPUAdam and HybridAdam under the plugins: the same as one process, and checkpoints to and from torch's AdamW."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from torch import nn
from zero_twins import Twins, mlp

from booster import Booster
from booster.optim import CPUAdam, HybridAdam
from booster.plugins import LowLevelZeroPlugin, TorchDDPPlugin
from booster.single_device import SingleDevicePlugin

pytestmark = pytest.mark.on_device

STAGES = pytest.mark.parametrize("stage", [1, 2])
SETTINGS = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}  # as zero_twins.adamw


def hybrid(model, **settings):
    return HybridAdam(model.parameters(), **SETTINGS, **settings)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), **SETTINGS)


class ByRank:
    """Makes torch's AdamW for the first model, which one process trains, and ours for the boosted one."""

    def __init__(self, make_ours) -> None:
        self.makers = [adamw, make_ours]

    def __call__(self, model):
        return self.makers.pop(0)(model)


@STAGES
@pytest.mark.parametrize("cls", [CPUAdam, HybridAdam])
@distributed(world_size=[2, 3])
def test_zero_equals_torch_in_one_process(stage, cls):
    make = partial(_make, cls)
    Twins(optimizer=ByRank(make), stage=stage).boost().train(range(4)).assert_equal()


def _make(cls, model):
    return cls(model.parameters(), **SETTINGS)


@STAGES
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@distributed(world_size=2, device="cpu")  # states of parameters on the host alone go to the disk
def test_zero_with_states_on_the_disk(stage, fraction, tmp_path):
    def offloaded(model):
        return hybrid(model, nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path)  # the same on both ranks

    twins = Twins(optimizer=ByRank(offloaded), stage=stage)
    twins.loss(twins.raw, twins.batch(9)[0]).backward()  # a step on whole parameters, whose states are then cut
    twins.user_optimizer.step()
    twins.user_optimizer.zero_grad()
    twins.loss(twins.plain, twins.batch(9)[0]).backward()
    twins.plain_optimizer.step()
    twins.plain_optimizer.zero_grad()
    twins.boost().train(range(4)).assert_equal()
    dist.barrier()
    own = list(Path(tmp_path).glob("booster-states-*/*"))
    assert len(own) == 2  # a file for each rank: that of the whole parameters is gone
    dist.barrier()
    del twins
    gc.collect()
    dist.barrier()
    assert list(Path(tmp_path).iterdir()) == []


@STAGES
@distributed(world_size=2)
def test_bf16_weights_with_masters(stage):
    boosted = [
        Twins(optimizer=make, stage=stage, precision="bf16").boost().train(range(4)) for make in (hybrid, fused_adamw)
    ]
    ours, theirs = (twins.model.state_dict() for twins in boosted)
    # The masters differ by a rounding in fp32 now and then, and so a weight by one unit of bf16.
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-5)
    for one, other in zip(*(twins.optimizer.param_groups[0]["params"] for twins in boosted), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@distributed(world_size=2)
def test_ddp_equals_torch_in_one_process(fraction, tmp_path):
    booster = Booster(plugin=TorchDDPPlugin())
    plain, raw = mlp().to(booster.device), mlp()
    reference = adamw(plain)
    offload = {"nvme_offload_fraction": fraction, "nvme_offload_dir": tmp_path} if fraction else {}
    model, optimizer, *_ = booster.boost(raw, hybrid(raw, **offload))
    rank = dist.get_rank()
    for step in range(4):
        batch = torch.randn(8, 7, generator=torch.Generator().manual_seed(step)).to(booster.device)
        (plain(batch) - 1).square().mean().backward()
        booster.backward((model(batch[4 * rank : 4 * rank + 4]) - 1).square().mean(), optimizer)
        for one in (reference, optimizer):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(dict(raw.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


# Checkpoints. Each entry: how many ranks, and the plugin.
LAYOUTS = {
    "one process": (1, lambda: SingleDevicePlugin("cpu")),
    "ddp x2": (2, TorchDDPPlugin),
    "zero 1 x2": (2, lambda: LowLevelZeroPlugin(stage=1, precision="fp32", reduce_bucket_size_in_m=1e-6)),
    "zero 2 x3": (3, lambda: LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=1e-6)),
}
KINDS = {
    "AdamW": adamw,
    "HybridAdam": hybrid,
    "on the disk": lambda model: hybrid(model, nvme_offload_fraction=1.0),
}


def boosted(layout, kind):
    booster = Booster(plugin=LAYOUTS[layout][1]())
    raw = mlp()
    model, optimizer, *_ = booster.boost(raw, KINDS[kind](raw))
    return booster, model, optimizer


def train(booster, model, optimizer, steps):
    for step in steps:
        batch = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).to(booster.device)
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        part = batch[12 // size * rank : 12 // size * (rank + 1)]
        booster.backward((model(part) - 1).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def save(layout, kind, path):
    booster, model, optimizer = boosted(layout, kind)
    train(booster, model, optimizer, range(3))
    booster.save_optimizer(optimizer, path, shard=True)
    booster.save_model(model, path + "-model", shard=True)


def load_and_save(layout, kind, path, again):
    booster, model, optimizer = boosted(layout, kind)
    booster.load_model(model, path + "-model")
    booster.load_optimizer(optimizer, path)
    booster.save_optimizer(optimizer, again, shard=True)
    train(booster, model, optimizer, range(3, 5))
    return {name: tensor.clone() for name, tensor in booster.unwrap_model(model).state_dict().items()}


def states(path):
    """Returns all states of a checkpoint, as one process loads them into torch's optimizer."""
    booster, model, optimizer = boosted("one process", "AdamW")
    booster.load_optimizer(optimizer, path)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}


@pytest.mark.parametrize(
    ("saved", "saved_kind", "loaded", "loaded_kind"),
    [
        ("zero 1 x2", "AdamW", "one process", "HybridAdam"),
        ("zero 1 x2", "AdamW", "zero 2 x3", "HybridAdam"),
        ("zero 2 x3", "HybridAdam", "zero 1 x2", "AdamW"),
        ("zero 2 x3", "HybridAdam", "zero 1 x2", "on the disk"),
        ("zero 1 x2", "on the disk", "zero 2 x3", "HybridAdam"),
        ("zero 1 x2", "on the disk", "ddp x2", "AdamW"),
        ("ddp x2", "on the disk", "zero 2 x3", "on the disk"),
        ("ddp x2", "AdamW", "one process", "on the disk"),
    ],
)
def test_checkpoints_go_anywhere_bit_for_bit(tmp_path, saved, saved_kind, loaded, loaded_kind):
    path, again = str(tmp_path / "saved"), str(tmp_path / "again")
    run_ranks(save, LAYOUTS[saved][0], saved, saved_kind, path)
    results = run_ranks(load_and_save, LAYOUTS[loaded][0], loaded, loaded_kind, path, again)
    first, second = states(path), states(again)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert float(values["step"]) == 3
        for key, value in values.items():
            assert torch.equal(value, second[name][key]), (name, key)
    plain, model, optimizer = boosted("one process", "AdamW")
    plain.load_model(model, path + "-model")
    plain.load_optimizer(optimizer, path)
    train(plain, model, optimizer, range(3, 5))
    torch.testing.assert_close(results[0], dict(plain.unwrap_model(model).state_dict()), rtol=1e-5, atol=1e-6)


def linear_on_disk(path):
    model = nn.Linear(40, 50)
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(model, hybrid(model, nvme_offload_fraction=1.0, nvme_offload_dir=path))
    return booster, model, optimizer


@distributed(world_size=2, device="cpu")
def test_no_memory_on_one_rank_fails_a_load_on_both(tmp_path):
    booster, model, optimizer = linear_on_disk(tmp_path / "disk")
    booster.backward(model(torch.ones(2, 40, device=booster.device)).sum(), optimizer)
    optimizer.step()
    booster.save_optimizer(optimizer, tmp_path / "saved", shard=True)
    booster, model, optimizer = linear_on_disk(tmp_path / "disk")
    with pytest.MonkeyPatch.context() as monkeypatch:  # of this rank, whose process serves other tests afterwards
        if dist.get_rank() == 1:
            monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
        with pytest.raises(Exception, match="bytes are free there"):
            booster.load_optimizer(optimizer, tmp_path / "saved")
    assert not optimizer.state
