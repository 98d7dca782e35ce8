"""TorchFSDPPlugin: weights changed inside of gathered(), and hooks of state dicts."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from fsdp_checkpoint_cases import (
    ONE_LEVEL,
    Job,
    Net,
    assert_same,
    slow,
)
from harness import distributed
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from booster import Booster
from booster.plugins import TorchFSDPPlugin

pytestmark = pytest.mark.on_device


class Stopped(Exception):
    """What a user's own code raises."""


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ONE_LEVEL
def test_changes_inside_of_gathered_are_kept(strategy, precision):
    job = Job(strategy, precision=precision, ignores="parts").train(0)
    before = job.weights()
    tokens = torch.arange(11, device=job.booster.device)
    with job.model.gathered() as net, torch.no_grad():
        assert net is job.booster.unwrap_model(job.model)
        assert_same(net.state_dict(), before)
        net.layers[1].wide.weight.mul_(2)
        net.layers[0].narrow.bias.data = torch.zeros(6, device=job.booster.device)
        net.frozen.bias.fill_(2)
        with job.model.gathered():
            net.scale.fill_(3)
    expected = before | {
        "layers.1.wide.weight": 2 * before["layers.1.wide.weight"],
        "layers.0.narrow.bias": torch.zeros(6),
        "frozen.bias": torch.full((6,), 2.0),
        "scale": torch.tensor(3.0),
    }
    assert_same(job.weights(), expected)
    if precision == "fp32":
        plain = Net(1).eval().to(job.booster.device)
        plain.load_state_dict(expected)
        job.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(job.model(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
        job.model.train()
    with pytest.raises(Stopped), job.model.gathered():
        raise Stopped
    job.train(1, 2)


@distributed(world_size=2)
def test_a_forward_inside_of_gathered_is_the_users_own_with_ignored_modules():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    plain = copy.deepcopy(net)
    plugin = TorchFSDPPlugin(ignored_modules=[net[0]], mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    booster = Booster(plugin=plugin)
    model, *_ = booster.boost(net)
    inputs = torch.ones(2, 4, device=booster.device)
    with model.gathered() as net, torch.no_grad():
        assert type(net) is nn.Sequential
        torch.testing.assert_close(net(inputs), plain.to(booster.device)(inputs))
        calls = []
        net[1].register_forward_hook(lambda *_: calls.append(1))
        assert type(copy.deepcopy(net)) is nn.Sequential
    assert model(inputs).dtype == torch.bfloat16
    assert calls == [1]


@distributed(world_size=2)
def test_a_low_precision_model_runs_inside_of_gathered_with_a_head_in_fp32():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3))
    plugin = TorchFSDPPlugin(ignored_modules=[net[1]], mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    booster = Booster(plugin=plugin)
    model, *_ = booster.boost(net)
    inputs = torch.ones(2, 4, dtype=torch.bfloat16)
    expected = model(inputs)
    with model.gathered(), torch.no_grad():
        torch.testing.assert_close(model(inputs), expected)  # on the host, which the model moves to its device
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(model)(inputs.to(booster.device)), expected)


@distributed(world_size=2)
def test_an_error_inside_of_gathered_on_one_rank_is_that_ranks_own():
    job = Job().train(0)
    try:
        with job.model.gathered():
            if dist.get_rank() == 1:
                raise Stopped
    except Stopped:
        assert dist.get_rank() == 1
    job.train(1)


def add_doubled(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    state[f"{prefix}doubled"] = 2 * state[f"{prefix}layers.0.wide.weight"]


@distributed(world_size=2)
@ONE_LEVEL
def test_what_a_hook_computes_of_weights_is_right(tmp_path, strategy):
    net = Net()
    net.register_state_dict_post_hook(add_doubled)
    job = Job(strategy, net=net)
    expected = 2 * Net().layers[0].wide.weight
    assert torch.equal(job.weights()["doubled"].cpu(), expected)
    for number, context in enumerate((nullcontext, job.model.gathered)):
        with context():
            job.booster.save_model(job.model, tmp_path / f"{number}.safetensors")
        found = load_file(tmp_path / f"{number}.safetensors")
        assert torch.equal(found["doubled"], expected)
        assert torch.equal(found["layers.0.wide.weight"], expected / 2)
