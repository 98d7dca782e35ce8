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
    with pytest.raises(ConfigError, match=r"'first.weight' was modified .* is lost"):
        nn.init.zeros_(net.first.weight)
    train(booster, model, optimizer)
    with pytest.raises(ConfigError, match=r"memory of 'second.weight' was read or replaced"):
        net.second.weight.data = torch.zeros(8, 8, device=booster.device)
    with pytest.raises(ConfigError, match=r"memory of 'first.weight' was read or replaced"):
        net.half()
    train(booster, model, optimizer)


@pytest.mark.parametrize("read", ["state_dict", "tensor_slices"])
@distributed(world_size=2)
def test_a_write_through_a_view_is_an_error_of_the_next_read(read):
    booster, model, optimizer = boosted()
    train(booster, model, optimizer)
    with torch.no_grad():
        booster.unwrap_model(model).first.weight.view(-1).mul_(0.5)
    with pytest.raises(ConfigError, match=r"'first.weight' was modified"):
        getattr(model, read)()


@distributed(world_size=2)
def test_modules_of_torchscript_are_refused():
    model = nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)), nn.Linear(4, 4))
    booster = Booster(plugin=GeminiPlugin(precision="fp32"))
    with pytest.raises(ConfigError, match=r"'0' is a module of TorchScript.*or LowLevelZeroPlugin"):
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@distributed(world_size=[1, 2])
def test_weights_that_stay_gathered_may_be_changed_between_steps(precision):
    net = Small()
    booster = Booster(plugin=GeminiPlugin(precision=precision, shard_param_frac=0))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.0))
    for value in (0.25, -0.5):
        train(booster, model, optimizer)
        for layer in (net.first, net.second):
            nn.init.constant_(layer.weight, value)
        train(booster, model, optimizer)
        assert all(bool((layer.weight == value).all()) for layer in (net.first, net.second))


@distributed(world_size=2)
def test_memory_of_weights_that_stay_gathered_is_not_replaced():
    booster, model, optimizer = boosted(shard_param_frac=0)
    booster.unwrap_model(model).second.weight.data = torch.zeros(8, 8, device=booster.device)
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
