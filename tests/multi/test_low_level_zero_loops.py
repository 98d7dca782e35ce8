"""LowLevelZeroPlugin: loops that people write: with mistakes in them, or what is done behind the optimizer's back."""

from __future__ import annotations

import copy
import gc
import weakref

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


KEPT = {
    "the user's model": lambda model, booster: booster.unwrap_model(model),
    "module": lambda model, booster: model.module,
    "submodules": lambda model, booster: _Chain(*model.module),
    "compiled": lambda model, booster: torch.compile(booster.unwrap_model(model), backend="aot_eager"),
    "compiled in place": lambda model, booster: _compiled_in_place(booster.unwrap_model(model)),
    "in another module": lambda model, booster: _Chain(booster.unwrap_model(model)),
    "in evaluation": lambda model, booster: booster.unwrap_model(model),
}


class _Chain:
    """Calls modules one after another."""

    def __init__(self, *modules):
        self.modules = modules

    def __call__(self, x):
        for module in self.modules:
            x = module(x)
        return x


def _compiled_in_place(module):
    module.compile(backend="aot_eager")
    return module


def _mlp(traces=False):
    torch.manual_seed(0)
    first = nn.Linear(6, 8)
    return nn.Sequential(torch.jit.trace(first, torch.ones(2, 6)) if traces else first, nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("traces", [False, True])
@pytest.mark.parametrize("kept", KEPT)
@distributed(world_size=2)
def test_modules_that_are_kept_from_before_the_loop_wait_for_weights(kept, traces):
    plain = _mlp().to(current_device())
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32", overlap_allgather=True, reduce_bucket_size_in_m=1e-5))
    model, optimizer, *_ = booster.boost(model := _mlp(traces), torch.optim.SGD(model.parameters(), lr=0.5))
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    run = KEPT[kept](model, booster)
    for step in range(4):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(current_device())
        part = batch.chunk(2)[dist.get_rank()]
        if kept == "in evaluation":
            with torch.no_grad():
                torch.testing.assert_close(run(batch), plain(batch))
        called = model if kept == "in evaluation" else run
        booster.backward(called(part).square().mean(), optimizer)
        plain(batch).square().mean().backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))


@distributed(world_size=2)
def test_the_boosted_model_runs_its_first_layers_while_weights_are_in_flight():
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32", overlap_allgather=True, reduce_bucket_size_in_m=1e-5))
    model, optimizer, *_ = booster.boost(model := _mlp(), torch.optim.SGD(model.parameters(), lr=0.5))
    other, pending, x = nn.Linear(6, 6, device=current_device()), [], torch.ones(2, 6, device=current_device())
    model.module[0].register_forward_hook(lambda *_: pending.append(optimizer.param_all_gather.is_pending))
    for _ in range(3):
        other(x)  # another model's forward does not wait, nor does a module around the boosted model
        booster.backward(nn.Sequential(other, model)(x).sum(), optimizer)
        assert not nn.modules.module._has_any_global_hook()
        optimizer.step()
        optimizer.zero_grad()
    assert pending == [False, True, True]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(x[:, 1:])
    assert optimizer.param_all_gather.is_pending
    model.module[2](torch.ones(2, 8, device=current_device()))
    assert not optimizer.param_all_gather.is_pending


@distributed(world_size=2)
def test_a_model_that_is_deleted_while_weights_are_in_flight_leaves_no_hook():
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32", overlap_allgather=True))
    model, optimizer, *_ = booster.boost(model := _mlp(), torch.optim.SGD(model.parameters(), lr=0.5))
    booster.backward(model(torch.ones(2, 6, device=current_device())).sum(), optimizer)
    optimizer.step()
    deleted = weakref.ref(optimizer.param_all_gather)
    del model, optimizer, booster
    gc.collect()
    assert deleted() is None
    nn.Linear(1, 1)(torch.ones(1, 1))
    assert not nn.modules.module._has_any_global_hook()
