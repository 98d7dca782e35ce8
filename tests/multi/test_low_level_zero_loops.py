"""LowLevelZeroPlugin: loops that people write: with mistakes in them, or what is done behind the optimizer's back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn
from zero_twins import Twins

from booster import Booster, ConfigError, DesyncError
from booster.device import current_device
from booster.plugins import LowLevelZeroPlugin

pytestmark = pytest.mark.on_device

STAGES = pytest.mark.parametrize("stage", [1, 2])


@STAGES
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
@distributed(world_size=2)
def test_a_plain_backward_is_averaged_where_nothing_is_scaled(stage, ranks):
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32"))
    model, optimizer, *_ = booster.boost(model := nn.Linear(3, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        before = model.state_dict()["bias"].clone()
        if dist.get_rank() in ranks:
            model(torch.ones(2, 3, device=current_device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model.state_dict()["bias"], before - 0.1 * 2 * len(ranks) / 2)


@STAGES
@distributed(world_size=2)
def test_a_plain_backward_is_clipped_by_the_plugin_too(stage):
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32", max_norm=1e-3))
    model, optimizer, *_ = booster.boost(model := nn.Linear(3, 2), torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.state_dict()["bias"].clone()
    model(torch.ones(2, 3, device=current_device())).sum().backward()
    norm = 2 * (2 + 6) ** 0.5  # every weight and bias has a gradient of 2
    optimizer.step()
    moved = before - model.state_dict()["bias"]
    torch.testing.assert_close(moved, torch.full_like(moved, 2e-3 / norm), rtol=1e-3, atol=1e-6)


@STAGES
@distributed(world_size=2)
def test_a_loss_through_two_models_trains_both(stage):
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32"))
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    whole = torch.nn.Sequential(copy.deepcopy(first), copy.deepcopy(second)).to(current_device())
    expected = torch.optim.SGD(whole.parameters(), lr=0.1)
    one, of_one, *_ = booster.boost(first, torch.optim.SGD(first.parameters(), lr=0.1))
    two, of_two, *_ = booster.boost(second, torch.optim.SGD(second.parameters(), lr=0.1))
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).to(current_device())
        whole(x).square().mean().backward()
        mine = x[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
        booster.backward(two(one(mine)).square().mean(), of_one)
        for optimizer in (of_one, of_two, expected):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close([*one.parameters(), *two.parameters()], list(whole.parameters()))


@STAGES
@distributed(world_size=2)
def test_a_gradient_set_by_hand_is_an_error_on_all_ranks(stage):
    twins = Twins(stage=stage).boost()
    twins.backward(0)
    if dist.get_rank() == 1:
        parameter = next(twins.model.parameters())
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match=r"was set by hand.*register_gradient_hook"):
        twins.optimizer.step()


@distributed(world_size=2)
def test_the_optimizer_from_before_boost_refuses_to_step():
    raw = torch.optim.SGD((model := nn.Linear(3, 2)).parameters(), lr=0.1)
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    model, optimizer, *_ = booster.boost(model, raw)
    booster.backward(model(torch.ones(2, 3, device=current_device())).sum(), optimizer)
    with pytest.raises(ConfigError, match="on the optimizer that it returned"):
        raw.step()
    optimizer.step()


@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@distributed(world_size=2)
def test_weights_that_were_changed_in_place_are_taken_over(stage, precision):
    booster = Booster(plugin=LowLevelZeroPlugin(stage, precision))
    model, optimizer, *_ = booster.boost(model := nn.Linear(3, 2), torch.optim.SGD(model.parameters(), lr=0.01))
    booster.backward(model(torch.ones(2, 3, device=current_device())).sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        booster.unwrap_model(model).bias.fill_(2.0)
    booster.backward(model(torch.ones(2, 3, device=current_device())).sum(), optimizer)
    optimizer.step()
    bias = model.state_dict()["bias"].float()
    torch.testing.assert_close(bias, torch.full_like(bias, 1.98), rtol=4e-3, atol=0)


@distributed(world_size=2)
def test_settings_that_differ_between_ranks_are_an_error_on_all():
    rank = dist.get_rank()
    for arguments, rate, named in [
        ({"stage": 1 + rank}, 0.1, "stage=1"),
        ({"max_norm": float(rank)}, 0.1, "max_norm=0.0"),
        ({}, 0.1 + rank, "lr=0.1"),
    ]:
        model = nn.Linear(3, 2)
        with pytest.raises(DesyncError, match=named):
            Booster(plugin=LowLevelZeroPlugin(**arguments)).boost(model, torch.optim.SGD(model.parameters(), lr=rate))


@distributed(world_size=2)
def test_a_copy_of_the_model_is_on_its_own_and_casts_are_refused():
    twins = Twins(overlap_allgather=True).boost().train()
    average = torch.optim.swa_utils.AveragedModel(twins.model)
    before = [parameter.clone() for parameter in average.parameters()]
    twins.train(range(5, 7))
    assert all(torch.equal(old, new) for old, new in zip(before, average.parameters(), strict=True))
    average.update_parameters(twins.model)
    assert not all(torch.equal(old, new) for old, new in zip(before, average.parameters(), strict=True))
    with pytest.raises(ConfigError, match=r"torch\.float16 on .*before boost"):
        twins.model.half()
    twins.model.to(current_device())
    twins.train(range(7, 9)).assert_equal()
