"""Schedulers on ranks that share the optimizer's states: the same curve, saved on some and gone on with on others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, run_ranks
from lr_scheduler_cases import CASES, hyperparameters
from torch import nn

from booster import Booster
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin

pytestmark = pytest.mark.on_device

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 256}),
}
STEPS = 4


def train(path: str, plugin: str, name: str, *, resumes: bool) -> tuple[list[list[float]], list[float]]:
    """Trains on all samples on every rank; returns learning rates and losses, and saves at the end."""
    torch.manual_seed(0)
    booster = Booster(plugin=PLUGINS[plugin]())
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = CASES[name](optimizer)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    if resumes:
        booster.load(Path(path), model, optimizer, scheduler)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(booster.device)
    rates, losses = [], []
    for _ in range(STEPS):
        loss = (model(x) - 1).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(hyperparameters(optimizer))
        losses.append(loss.item())
    if not resumes:
        booster.save(Path(path), model, optimizer, scheduler)
    return rates, losses


def in_one_process(name: str) -> tuple[list[list[float]], list[float]]:
    """The same steps twice over in plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = CASES[name](optimizer)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    rates, losses = [], []
    for _ in range(2 * STEPS):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(hyperparameters(optimizer))
        losses.append(loss.item())
    return rates, losses


def first_half(path: str, plugin: str, name: str):
    return train(path, plugin, name, resumes=False)


def second_half(path: str, plugin: str, name: str):
    return train(path, plugin, name, resumes=True)


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("cosine after warm-up", ("ddp", 2), ("zero", 3)),
        ("one cycle", ("zero", 2), ("gemini", 2)),
        ("polynomial", ("gemini", 2), ("ddp", 1)),
    ],
)
def test_a_schedule_goes_on_under_another_plugin(tmp_path, name, saved, loaded):
    with torch.random.fork_rng():
        rates, losses = in_one_process(name)
    path = str(tmp_path / "c")
    halves = (
        run_ranks(first_half, saved[1], path, saved[0], name),
        run_ranks(second_half, loaded[1], path, loaded[0], name),
    )
    for half, of_ranks in enumerate(halves):
        part = slice(half * STEPS, (half + 1) * STEPS)
        for found_rates, found_losses in of_ranks:
            assert found_rates == rates[part]
            assert found_losses == pytest.approx(losses[part], rel=1e-5)  # ranks add gradients in another order


def step_by_own_losses(plugin: str) -> None:
    torch.manual_seed(0)
    booster = Booster(plugin=plugin, mixed_precision="fp32")
    model = nn.Linear(8, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.1, 0)
    for step in range(4):
        booster.backward(model(torch.ones(2, 8).to(booster.device)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(float(-step if dist.get_rank() == 0 else step))  # only the second rank's becomes worse


@pytest.mark.parametrize("plugin", ["torch_ddp", "low_level_zero", "gemini", "torch_fsdp", "hybrid_parallel"])
def test_learning_rates_that_differ_between_ranks_are_an_error(plugin):
    with pytest.raises(
        RanksFailed, match=r"after step \d, of 'lr' in param_groups.0.: rank 0 0\.1, rank 1 0\.01\. .*gather"
    ):
        run_ranks(step_by_own_losses, 2, plugin)
