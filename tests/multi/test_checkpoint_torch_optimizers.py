"""The optimizer of a plain torch loop, as `torch.save` wrote its state, continues under every plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from safetensors.torch import load_file
from torch import nn

from booster import Booster
from booster.errors import CheckpointError

pytestmark = pytest.mark.on_device

PLUGINS = ["torch_ddp", "low_level_zero", "gemini", "torch_fsdp", "hybrid_parallel"]
OPTIMIZERS = {"adamw": torch.optim.AdamW, "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def make_optimizer(kind: str, model: nn.Module, *, by_name: bool, reverses: bool = False) -> torch.optim.Optimizer:
    parameters = list(model.named_parameters() if by_name else model.parameters())
    if reverses:
        parameters.reverse()
    return OPTIMIZERS[kind]([{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "lr": 0.02}])


def samples(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def train_plain(kind: str, *, by_name: bool, num_steps: int, path: Path | None = None) -> nn.Module:
    model = build()
    optimizer = make_optimizer(kind, model, by_name=by_name)
    for step in range(num_steps):
        model(samples(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if path is not None:
        torch.save(model.state_dict(), path / "model.pt")
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return model


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("plugin", PLUGINS)
@distributed(world_size=2)
def test_a_plain_optimizer_continues(plugin, kind, by_name, tmp_path):
    if dist.get_rank() == 0:
        train_plain(kind, by_name=by_name, num_steps=3, path=tmp_path)
    dist.barrier()
    expected = train_plain(kind, by_name=by_name, num_steps=5)
    booster, model = Booster(plugin=plugin, mixed_precision="fp32"), build()
    model, optimizer, *_ = booster.boost(model, make_optimizer(kind, model, by_name=by_name))
    booster.load_model(model, tmp_path / "model.pt")
    booster.load_optimizer(optimizer, tmp_path / "optimizer.pt")
    for step in range(3, 5):
        x = samples(step).chunk(2)[dist.get_rank()].to(booster.device)
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.save_model(model, tmp_path / "trained.safetensors")
    dist.barrier()
    for name, weight in load_file(tmp_path / "trained.safetensors").items():
        torch.testing.assert_close(weight, expected.state_dict()[name], rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
def test_a_plain_optimizer_of_other_parameters_is_refused(tmp_path):
    if dist.get_rank() == 0:
        train_plain("adamw", by_name=False, num_steps=2, path=tmp_path)
        torch.save({"state": {0: 1}, "param_groups": [{"params": [0]}]}, tmp_path / "damaged.pt")
    dist.barrier()
    booster, model = Booster(plugin="low_level_zero", mixed_precision="fp32"), build()
    model, optimizer, *_ = booster.boost(model, make_optimizer("adamw", model, by_name=False, reverses=True))
    with pytest.raises(CheckpointError, match=r"'2.bias' has shape \(10, 6\) in the checkpoint, \(3,\) here"):
        booster.load_optimizer(optimizer, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="looks like the state_dict of a torch optimizer, but is not one"):
        booster.load_optimizer(optimizer, tmp_path / "damaged.pt")
    booster, model = Booster(plugin="low_level_zero", mixed_precision="fp32"), build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(CheckpointError, match="of a optimizer, which lacks dampening, momentum, and this is a SGD"):
        booster.load_optimizer(optimizer, tmp_path / "optimizer.pt")
