"""Copies of boosted models, and averages of their weights as torch keeps them, under every plugin."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from gemini_models import Stack, Twins
from harness import distributed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from booster import Booster, ConfigError
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device

PLUGINS = {
    "torch_ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 256}),
    "torch_fsdp": TorchFSDPPlugin,
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1, precision="fp32"),
}
DIVIDED = pytest.mark.parametrize("plugin", ["gemini", "torch_fsdp"])


class CopyTwins(Twins):
    def make_plugin(self, plugin):
        return PLUGINS[plugin]()

    def shown(self):
        """Returns what shows whole weights in the user's model."""
        return self.model.gathered() if hasattr(self.model, "gathered") else nullcontext()


def sgd(model):
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def without_prefix(state):
    return {name.removeprefix("module.").removeprefix("module."): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("what", ["the user's model", "the boosted model"])
@pytest.mark.parametrize("plugin", PLUGINS)
@distributed(world_size=2)
def test_averages_of_weights_equal_one_process(plugin, what):
    twins = CopyTwins(lambda: Stack(num_blocks=2), optimizer=sgd, plugin=plugin)
    averaging = get_ema_multi_avg_fn(0.5)
    expected = AveragedModel(twins.plain, multi_avg_fn=averaging)
    source = twins.model if what == "the boosted model" else twins.booster.unwrap_model(twins.model)
    with twins.shown():
        average = AveragedModel(source, multi_avg_fn=averaging)
    for step in range(3):
        twins.train([step])
        expected.update_parameters(twins.plain)
        with twins.shown():
            average.update_parameters(source)
    # As `assert_equal` has it: sums in fp32 in another order.
    found, wanted = without_prefix(average.state_dict()), without_prefix(expected.state_dict())
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=4e-6)
    torch.testing.assert_close(average(twins.batch(9)), expected(twins.batch(9)), rtol=2e-5, atol=4e-6)
    twins.train([3]).assert_equal()  # a copy took nothing away


@DIVIDED
@distributed(world_size=2)
def test_a_copy_of_divided_weights_is_an_error(plugin):
    twins = CopyTwins(lambda: Stack(num_blocks=2), optimizer=sgd, plugin=plugin)
    inside = twins.booster.unwrap_model(twins.model)
    for action in (copy.deepcopy, AveragedModel, lambda model: copy.deepcopy(model.blocks[1])):
        with pytest.raises(ConfigError, match=r"sharded over the ranks.*gathered"):
            action(inside)
    with twins.model.gathered():
        block = copy.deepcopy(inside.blocks[1])
    x = twins.batch(0)
    torch.testing.assert_close(block(x), twins.plain.blocks[1](x))
    twins.train(range(2)).assert_equal()


@pytest.mark.parametrize("root", [nn.ModuleDict, nn.ModuleList])
@distributed(world_size=2)
def test_a_container_without_forward_is_refused_by_fsdp_at_boost(root):
    parts = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))]
    model = root({"generator": parts[0], "judge": parts[1]} if root is nn.ModuleDict else parts)
    with pytest.raises(ConfigError, match=rf"is a {root.__name__}, which has no forward.*boost each child"):
        Booster(plugin=TorchFSDPPlugin()).boost(model, sgd(model))
    assert all(type(one) is nn.Parameter for one in model.parameters())
