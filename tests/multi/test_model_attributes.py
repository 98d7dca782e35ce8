"""Attributes and methods of the user's module through the boosted model, under every plugin."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from torch import nn
from zoo import TRANSFORMERS_MODULES

from booster import Booster, ConfigError
from booster.comm import count_communication
from booster.device import current_device
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device

preload(*TRANSFORMERS_MODULES)
PLUGINS = {
    "ddp": lambda: Booster(plugin=TorchDDPPlugin()),
    "ddp bf16": lambda: Booster(plugin=TorchDDPPlugin(), mixed_precision="bf16"),
    "zero 1": lambda: Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32")),
    "zero 2 bf16": lambda: Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16")),
    "zero 1 later weights": lambda: Booster(plugin=LowLevelZeroPlugin(precision="fp32", overlap_allgather=True)),
    "gemini": lambda: Booster(plugin=GeminiPlugin(precision="fp32")),
    "gemini bf16": lambda: Booster(plugin=GeminiPlugin(precision="bf16")),
    "fsdp": lambda: Booster(plugin=TorchFSDPPlugin()),
    "fsdp bf16": lambda: Booster(plugin=TorchFSDPPlugin(), mixed_precision="bf16"),
    "tp": lambda: Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")),
    "hybrid dp": lambda: Booster(plugin=HybridParallelPlugin(precision="fp32", zero_stage=1)),
}


class Net(nn.Module):
    """A loss that goes round the forward, and a buffer that ranks would have different values of."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.temperature = 1.0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, inputs):
        if self.training:
            self.seen += inputs.mean()
        return self.down(torch.tanh(self.up(inputs)))

    def loss(self, inputs, weight=1.0):
        hidden = self.up(inputs)
        return (self.down(torch.tanh(hidden)) * self.temperature).square().mean() * weight

    def whole_loss(self, inputs):
        return self(inputs).square().mean()

    def set_temperature(self, value):
        self.temperature = value
        return self

    def num_features(self):
        return self.up.in_features

    @property
    def total(self):
        return float(self.up.weight.sum() + self.down.weight.sum())


def train(name):
    """Trains by methods on this rank's part, and by plain torch on the whole batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model).to(current_device())
    booster = PLUGINS[name]()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    serial = torch.optim.SGD(reference.parameters(), lr=0.5)
    shares = booster.plugin.dp_size
    model.temperature = 1.5
    reference.temperature = 1.5
    if rank == 0:  # one rank alone may call what runs no module
        with count_communication() as count:
            assert model.num_features() == 4
            assert model.set_temperature(1.5).temperature == 1.5
        assert not count.calls
    for step in range(3):
        whole = torch.randn(4 * size, 4, generator=torch.Generator().manual_seed(step)).to(booster.device)
        mine = whole.chunk(shares)[booster.plugin.dp_rank]
        (reference.loss(whole, weight=2.0) + reference.whole_loss(whole)).backward()
        booster.backward(model.loss(mine, weight=2.0) + model.whole_loss(mine), optimizer)
        for one in (serial, optimizer):
            one.step()
            one.zero_grad()
    model.zero_grad()
    booster.backward(model.loss(mine), optimizer)  # this is where a method shares the first rank's buffers
    buffers = [torch.empty((), device=booster.device) for _ in range(size)]
    dist.all_gather(buffers, model.seen.float())
    assert all(torch.equal(one, buffers[0]) for one in buffers)
    model.eval()
    reference.eval()
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(9)).to(booster.device)
    with torch.no_grad():
        found, expected = model.loss(whole), reference.loss(whole)
    is_low = "bf16" in name
    torch.testing.assert_close(found.float(), expected, rtol=5e-2 if is_low else 1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PLUGINS)
def test_methods_train_as_the_forward_does(name):
    run_ranks(train, 2, name)


def scaled(model, inputs, step):
    """Sets a buffer after a forward whose graph has saved it."""
    loss = (model(inputs) * model.scale).square().mean()
    model.scale = torch.tensor(3.0 + step)
    return loss


def by_submodules(model, inputs, step):
    return model.down(torch.tanh(model.up(inputs))).square().mean()


def by_names(model, inputs, step):
    return model.get_submodule("down")(torch.tanh(model.get_submodule("up")(inputs))).square().mean()


def by_modules(model, inputs, step):
    modules = dict(model.named_modules())
    return modules["down"](torch.tanh(modules["up"](inputs))).square().mean()


def by_property(model, inputs, step):
    return model.total * model(inputs).square().mean()


def train_by(name, loss_of):
    torch.manual_seed(0)
    booster = PLUGINS[name]()
    model = Net()
    reference = copy.deepcopy(model).to(booster.device)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    serial = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(3):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).to(booster.device)
        loss_of(reference, inputs, step).backward()
        booster.backward(loss_of(model, inputs, step), optimizer)
        for one in (serial, optimizer):
            one.step()
            one.zero_grad()
    model.eval()
    reference.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), reference(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ddp", "zero 1", "gemini", "fsdp", "tp"])
def test_a_buffer_set_between_forward_and_backward_leaves_the_graph_valid(name):
    run_ranks(train_by, 2, name, scaled)


@pytest.mark.parametrize("loss_of", [by_submodules, by_names, by_modules, by_property])
def test_what_is_read_through_the_model_waits_for_weights_in_flight(loss_of):
    run_ranks(train_by, 2, "zero 1 later weights", loss_of)


def generate(name):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    ids = torch.tensor([[1, 5, 7]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = copy.deepcopy(model).eval().generate(ids, **options)
    booster = PLUGINS[name]()
    ids = ids.to(booster.device)
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    model.eval()
    assert model.config.vocab_size == 32
    assert model.num_parameters() > 0
    found = model.generate(ids, **options)
    if "bf16" not in name:
        assert torch.equal(found.cpu(), expected)
    assert found.shape == expected.shape


@pytest.mark.parametrize("name", PLUGINS)
def test_transformers_models_generate(name):
    run_ranks(generate, 2, name)


def stages():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"))
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.note = 3
    assert booster.unwrap_model(model).note == 3
    with pytest.raises(ConfigError, match=r"write booster\.execute_pipeline"):
        model.forward(torch.ones(2, 4, device=booster.device))
    with pytest.raises(ConfigError, match=r"write booster\.execute_pipeline"):
        model(torch.ones(2, 4, device=booster.device))


class Losses(nn.Sequential):
    def loss(self, inputs):
        return self(inputs).sum()


def stages_of_a_method():
    model = Losses(*(nn.Linear(4, 4) for _ in range(4)))
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"))
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"write booster\.execute_pipeline"):
        model.loss(torch.ones(2, 4, device=booster.device))


@pytest.mark.parametrize("body", [stages, stages_of_a_method])
def test_methods_that_run_stages_are_refused(body):
    run_ranks(body, 2)
