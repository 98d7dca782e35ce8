"""Ranks that went apart without a word are found out by a save, which writes nothing then."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from booster import Booster
from booster.errors import DesyncError
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin

pytestmark = pytest.mark.on_device

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 64}),
}


def train_and_save(folder, name, mistake, saves):
    booster = Booster(plugin=PLUGINS[name]())
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    for step in range(3):
        # A step that is left out before another backward is found there, under DDP.
        is_wrong = step == (2 if mistake == "step" else 1) and dist.get_rank() == 1
        booster.backward(model(torch.ones(2, 3, device=booster.device)).square().mean(), optimizer)
        if is_wrong and mistake == "rate":
            optimizer.param_groups[0]["lr"] = 0.5
        if not (is_wrong and mistake == "step"):
            optimizer.step()
        optimizer.zero_grad()
        for _ in range(2 if is_wrong and mistake == "schedule" else 1):
            scheduler.step()
    save = {
        "save": lambda: booster.save(folder, model, optimizer, scheduler),
        "save_optimizer": lambda: booster.save_optimizer(optimizer, folder, shard=True),
    }[saves]
    if mistake is None:
        save()
        return ""
    with pytest.raises(DesyncError) as caught:
        save()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "mistake", "saves", "named"),
    [
        (
            "zero",
            "rate",
            "save",
            r"rank 0 has the optimizer with lr=0.1 in group 0, rank 1 has the optimizer with lr=0.5",
        ),
        ("gemini", "rate", "save_optimizer", r"rank 1 has the optimizer with lr=0.5 in group 0"),
        ("ddp", "step", "save", r"with 3 steps since boost\(\), rank 1 has the optimizer with 2 steps since boost\(\)"),
        ("ddp", "step", "save_optimizer", r"rank 1 has the optimizer with 2 steps"),
        ("ddp", "schedule", "save", r"rank 0 has the scheduler after 3 steps, rank 1 has the scheduler after 4 steps"),
    ],
)
def test_ranks_that_went_apart_are_told(tmp_path, name, mistake, saves, named):
    folder = tmp_path / "checkpoint"
    texts = run_ranks(train_and_save, 2, folder, name, mistake, saves)
    assert texts[0] == texts[1]
    assert f"the ranks differ in {saves}()" in texts[0]
    assert re.search(named, texts[0])
    assert not folder.exists()


@pytest.mark.parametrize("name", PLUGINS)
def test_ranks_that_are_together_save(tmp_path, name):
    run_ranks(train_and_save, 2, tmp_path / "checkpoint", name, None, "save")
    assert (tmp_path / "checkpoint").is_dir()
