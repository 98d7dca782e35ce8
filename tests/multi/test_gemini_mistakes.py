"""What users do wrong with weights that are divided among the ranks, and what they are told."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn

from booster import Booster
from booster.errors import BoosterError, ConfigError
from booster.plugins import GeminiPlugin
from booster.plugins.gemini.model import ModifiedCheck

pytestmark = pytest.mark.on_device


class Small(nn.Module):
    """Two layers, in chunks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 8) to (batch, 8)."""
        return self.second(torch.tanh(self.first(x)))


def boosted(**arguments):
    torch.manual_seed(0)
    model = Small()
    booster = Booster(plugin=GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 72}, **arguments))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    return booster, model, optimizer


def train(booster, model, optimizer) -> float:
    loss = model(torch.ones(2, 8, device=booster.device)).square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train_steps(num_steps, booster, model, optimizer) -> None:
    for _ in range(num_steps):
        train(booster, model, optimizer)


PLACEMENTS = [{}, {"shard_param_frac": 0.5}, {"placement_policy": "cpu"}]


@pytest.mark.parametrize("arguments", PLACEMENTS)
@distributed(world_size=[2, 3])
def test_other_changes_on_another_rank_are_refused_and_nothing_is_taken_over(arguments):
    booster, model, optimizer = boosted(**arguments)
    train(booster, model, optimizer)
    before = model.state_dict()

    def change_on_one_rank() -> None:
        with model.gathered() as net:
            for parameter in net.parameters() if dist.get_rank() == 1 else ():
                nn.init.zeros_(parameter)

    with pytest.raises(ConfigError, match=r"on ranks \[1\] differently from rank 0"):
        change_on_one_rank()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(booster, model, optimizer)


@pytest.mark.parametrize("arguments", PLACEMENTS)
@distributed(world_size=2)
def test_one_rank_alone_may_run_the_model_inside_of_gathered(arguments):
    booster, model, optimizer = boosted(**arguments)
    train(booster, model, optimizer)
    x = torch.ones(1, 8, device=booster.device)
    with torch.no_grad():
        expected = model(x)
    with model.gathered() as net, torch.no_grad():
        for _ in range(3 * dist.get_rank()):
            assert torch.equal(net(x), expected)
    train(booster, model, optimizer)


@distributed(world_size=2)
def test_a_state_of_nan_is_not_given_away():
    booster, model, _ = boosted()
    net = booster.unwrap_model(model)
    with pytest.raises(ConfigError, match=r"use booster.save_model\(\)"):
        net.state_dict()
    with model.gathered():
        assert not any(tensor.isnan().any() for tensor in net.state_dict().values())
    copied = copy.deepcopy(model)  # for an average, or to generate on one rank
    assert not any(tensor.isnan().any() for tensor in copied.unwrap().state_dict().values())
    if dist.get_rank() == 0:
        assert torch.isfinite(copied(torch.ones(1, 8, device=booster.device))).all()


@distributed(world_size=2)
def test_changes_between_steps_are_refused():
    booster, model, optimizer = boosted()
    net = booster.unwrap_model(model)
    train(booster, model, optimizer)
    nn.init.zeros_(net.first.weight)
    # Without a wait for a device, which tells it by some later step.
    num_steps = 1 if booster.device.type == "cpu" else ModifiedCheck.MAX_AGE + 2
    with pytest.raises(ConfigError, match=r"one of 'first.weight', 'first.bias'"):
        train_steps(num_steps, booster, model, optimizer)
    optimizer.zero_grad()
    train(booster, model, optimizer)
    net.second.weight.data = torch.zeros(8, 8, device=booster.device)
    with pytest.raises(ConfigError, match=r"memory of 'second.weight' was replaced"):
        train(booster, model, optimizer)


@distributed(world_size=2)
def test_a_step_inside_of_gathered_is_refused():
    booster, model, optimizer = boosted()
    loss = model(torch.ones(2, 8, device=booster.device)).square().mean()
    booster.backward(loss, optimizer)
    with model.gathered(), pytest.raises(ConfigError, match="leave the block first"):
        optimizer.step()


@distributed(world_size=2)
def test_a_disk_that_cannot_be_written_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    before = copy.deepcopy(model.state_dict())
    plugin = GeminiPlugin(
        precision="fp32",
        chunk_config_dict={"chunk_size": 72},
        offload_optim_frac=0.3,
        offload_param_frac=0.3,
        offload_dir="/proc" if dist.get_rank() == 1 else None,
    )
    with pytest.raises(ConfigError if dist.get_rank() == 1 else BoosterError):
        Booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
