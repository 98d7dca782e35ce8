"""What ranks do differently in a step is an error on all of them, under every plugin that averages gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn

from booster import Booster, DesyncError
from booster.device import current_device

pytestmark = pytest.mark.on_device

PLUGINS = ["torch_ddp", "low_level_zero", "gemini", "torch_fsdp", "hybrid_parallel"]
MESSAGES = {
    "norm": "clip gradients differently, after step .: rank 0 to 0.5, rank 1 to 1. Clip on every rank",
    "value": "clip gradients differently, after step .: rank 0 to 0.5, rank 1 to 1. Clip on every rank",
    "one rank": "clip gradients differently, after step .: rank 0 to 0.5, rank 1 not at all. Clip on every rank",
    "items": "rank 0 gave num_items, rank 1 did not give num_items. Give num_items",
    "averaged": "rank 0 averages 2, rank 1 averages 3. Call accumulate",
    "rate": "other values, after step ., of 'lr' in param_groups.0.: rank 0 0.1, rank 1 0.2",
}
# Where the forwards of all ranks are collective, other numbers of microbatches are found by them.
CASES = [
    (plugin, what)
    for plugin in PLUGINS
    for what in MESSAGES
    if what != "averaged" or plugin not in ("gemini", "torch_fsdp")
]


def train(booster: Booster, model: nn.Module, optimizer, what: str) -> None:
    rank = dist.get_rank()
    for _ in range(2):
        num_microbatches = 2 + (rank if what == "averaged" else 0)
        for _ in range(num_microbatches):
            with booster.accumulate(model, optimizer, num_microbatches):
                num_items = 4 if what == "items" and rank == 0 else None
                loss = model(torch.ones(2, 8, device=current_device())).square().mean()
                booster.backward(loss, optimizer, num_items=num_items)
                if what == "norm" or (what == "one rank" and rank == 0):
                    booster.clip_grad_norm_(optimizer, 0.5 * (1 + rank))
                if what == "value":
                    optimizer.clip_grad_by_value(0.5 * (1 + rank))
                optimizer.step()
                optimizer.zero_grad()
        if what == "rate":
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)


@pytest.mark.parametrize(("plugin", "what"), CASES)
@distributed(world_size=2)
def test_what_ranks_do_differently_is_an_error(plugin, what):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    booster = Booster(plugin=plugin, mixed_precision="fp32")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(DesyncError, match=MESSAGES[what]):
        train(booster, model, optimizer, what)


@pytest.mark.parametrize("plugin", PLUGINS)
@distributed(world_size=2)
def test_equal_steps_raise_nothing(plugin):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    booster = Booster(plugin=plugin, mixed_precision="fp32")
    groups = [{"params": [model.weight], "lr": torch.tensor(0.1)}, {"params": [model.bias], "weight_decay": 0.1}]
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(groups, lr=0.2))
    for what in ("norm of all", "value of all"):
        for _ in range(3):
            booster.backward(model(torch.ones(2, 8, device=current_device())).square().mean(), optimizer)
            if what == "norm of all":
                booster.clip_grad_norm_(optimizer, 0.5)
            else:
                optimizer.clip_grad_by_value(0.1)
            optimizer.step()
            optimizer.zero_grad()
