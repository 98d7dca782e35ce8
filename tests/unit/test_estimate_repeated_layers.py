"""A few of many equal layers tell exactly what all of them keep, or the whole model is run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import estimate_memory
from booster.estimate import estimate, repeated_layers
from booster.estimate.repeated_layers import find_repeated_layers

DEPTH = 15


class Layer(nn.Module):
    def __init__(self, index, width=8):
        super().__init__()
        self.layer_idx = index
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, depth=DEPTH):
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(depth))
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 100)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean()


class Checkpointed(Stack):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).mean()


class Remembers(Stack):
    """Holds something of every layer until the end."""

    def forward(self, x):
        x, cache = self.embed(x), []
        for layer in self.layers:
            x = layer(x)
            cache.append(x.detach() * 2)
        return self.head(x).mean()


class LongSkips(Stack):
    """Adds what the first layers gave to what the last ones give."""

    def forward(self, x):
        x, skips = self.embed(x), []
        for index, layer in enumerate(self.layers):
            if index >= (len(self.layers) + 1) // 2:
                x = x * skips.pop()
            x = layer(x)
            skips.append(x)
        return self.head(x).mean()


class Joins(Stack):
    """Makes one tensor of what all layers gave."""

    def forward(self, x):
        x, found = self.embed(x), []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return self.head(torch.stack(found)).mean()


class ByNumber(Stack):
    """Calls layers by their number."""

    def forward(self, x):
        x = self.embed(x)
        for index in range(DEPTH):
            x = self.layers[index](x)
        return self.head(x).mean()


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch):
    monkeypatch.setattr(repeated_layers, "MIN_NUMEL", 0)


def both_ways(model, monkeypatch, plugin="torch_ddp", **settings):
    """Returns the memory as it was found, that of the whole model, and the depths of all simulations of the first."""
    depths = []
    simulate = estimate.simulate

    def noted(make_training, *arguments, **options):
        depths.append(len(make_training()[0].layers))
        return simulate(make_training, *arguments, **options)

    monkeypatch.setattr(estimate, "simulate", noted)
    given = {"batch": torch.zeros(6, 5), "criterion": lambda outputs, _: outputs, "num_ranks": 2, "settings": settings}
    found = estimate_memory(model, plugin, **given).memory
    found_depths = list(depths)
    monkeypatch.setattr(repeated_layers, "MIN_LAYERS", 1000)
    return found, estimate_memory(model, plugin, **given).memory, found_depths


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Stack, Checkpointed, Remembers, LongSkips, Joins])
@pytest.mark.parametrize(
    ("plugin", "settings"),
    [("torch_ddp", {}), ("torch_fsdp", {}), ("gemini", {"precision": "bf16"}), ("low_level_zero", {"stage": 2})],
)
def test_few_layers_tell_what_all_keep(cls, plugin, settings, monkeypatch):
    found, whole, depths = both_ways(cls(), monkeypatch, plugin, **settings)
    assert depths == [3, 5]
    for name in ("backward", "step", "steady_state"):
        assert abs(getattr(found, name).total / getattr(whole, name).total - 1) < 0.03, (name, found, whole)
    assert abs(found.sent / whole.sent - 1) < 0.03


def test_the_whole_is_run_where_it_must(monkeypatch):
    found, whole, depths = both_ways(ByNumber(), monkeypatch)
    assert found == whole
    assert depths == [3, DEPTH]


def test_layers_that_differ_are_no_stack():
    assert find_repeated_layers(Stack()) == "layers"
    assert find_repeated_layers(Stack(depth=12)) is None
    wider = Stack()
    wider.layers[9].up = nn.Linear(8, 25)
    frozen = Stack()
    frozen.layers[9].up.weight.requires_grad_(False)
    attribute = Stack()
    attribute.layers[9].rate = 0.1
    hooked = Stack()
    hooked.layers[9].register_forward_hook(lambda *_: None)
    tied = Stack()
    tied.layers[9].up.weight = tied.layers[8].up.weight
    tied_outside = Stack()
    tied_outside.head = tied_outside.layers[9].up
    listed = Stack()
    listed.kinds = ["full"] * 14 + ["sliding"]
    for model in (wider, frozen, attribute, hooked, tied, tied_outside, listed):
        assert find_repeated_layers(model) is None
    alike = Stack()
    alike.kinds = ["full"] * DEPTH
    assert find_repeated_layers(alike) == "layers"


def test_the_model_is_left_as_it_was(monkeypatch):
    model = Stack()
    layers = list(model.layers)
    both_ways(model, monkeypatch)
    assert list(model.layers) == layers
    assert not any(one._forward_pre_hooks for one in model.modules())
