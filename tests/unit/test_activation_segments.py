"""Segments of several layers in one process: bits, how often layers run, and what can't be recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster import ConfigError, checkpoint_activations
from booster.core.activation_schedule import ActivationSchedule


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.num_calls = 0

    def forward(self, x, scale=None, *, mask):
        self.num_calls += 1
        y = nn.functional.dropout(self.up(self.norm(x)).relu(), 0.3)
        x = x + self.down(y * mask) * (1 if scale is None else scale["scale"])
        return x, {"calls": self.num_calls}


class Model(nn.Module):
    """Layers that return tuples and take keywords, with random numbers between them."""

    def __init__(self, num_layers=5, between=None):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.between = between

    def forward(self, x):
        x = self.first(x)
        mask = torch.ones(16)
        scale = self.scale * 2
        for index, layer in enumerate(self.layers):
            torch.rand(3)
            x, _ = layer(x, {"scale": scale}, mask=mask)
            if self.between is not None:
                x = self.between(index, x)
        return x


def gradients(schedule, between=None, passes=1, autocast=False):
    torch.manual_seed(0)
    model = Model(between=between)
    if schedule is not None:
        checkpoint_activations(model, "schedule", schedule=schedule)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().sum()
    for index in range(passes):
        loss.backward(retain_graph=index < passes - 1)
    return [x.grad, *(one.grad for one in model.parameters())], [layer.num_calls for layer in model.layers]


NAMES = [f"layers.{index}" for index in range(5)]
SCHEDULES = [
    ([NAMES], [2, 2, 2, 2, 2]),
    ([NAMES[0], NAMES[1:]], [1, 2, 2, 2, 2]),
    ([[*NAMES[:2]], [*NAMES[2:4]], NAMES[4]], [2, 2, 2, 2, 1]),
    ([[[NAMES[0]], [NAMES[1]], [NAMES[2]], NAMES[3]], [NAMES[4]]], [3, 3, 3, 2, 2]),
    ([[[[NAMES[0]], NAMES[1]], NAMES[2]], NAMES[3], NAMES[4]], [4, 3, 2, 1, 1]),
    ([[[NAMES[0], NAMES[1]], [NAMES[2], NAMES[3]]]], [3, 3, 2, 2, 1]),
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("schedule", "calls"), SCHEDULES)
def test_gradients_are_the_same_and_layers_run_as_often_as_the_schedule_says(schedule, calls, autocast):
    expected, _ = gradients(None, autocast=autocast)
    found, num_calls = gradients(schedule, autocast=autocast)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert num_calls == calls


def test_a_second_backward_over_a_retained_graph():
    expected, _ = gradients(None, passes=2)
    found, num_calls = gradients([NAMES[0], NAMES[1:]], passes=2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert num_calls == [1, 3, 3, 3, 3]


def test_the_random_state_is_that_without_recomputation():
    gradients(None)
    expected = torch.get_rng_state()
    gradients([NAMES])
    assert torch.equal(torch.get_rng_state(), expected)


def test_layers_that_are_no_chain():
    with pytest.raises(ConfigError, match=r"recomputes 'layers.2' from an earlier layer, but no argument"):
        gradients([NAMES], between=lambda index, x: x * 2 if index == 1 else x)
    expected, _ = gradients(None, between=lambda index, x: x * 2 if index == 1 else x)
    found, _ = gradients([NAMES[:2], NAMES[2:]], between=lambda index, x: x * 2 if index == 1 else x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_input_that_is_modified_in_place():
    kept = []

    def modify(index, x):
        if index == 1:
            kept.append(x)
        if index == 3:
            kept[0].data.zero_()
            with torch.no_grad():
                kept[0].add_(1)
        return x

    with pytest.raises(RuntimeError, match="has been modified by an in-place operation"):
        gradients([NAMES[:2], NAMES[2:]], between=modify)


def test_a_layer_that_does_something_else_the_second_time():
    model = nn.ModuleList(Layer() for _ in range(2))
    net = nn.Module()
    net.layers = model
    checkpoint_activations(net, "schedule", schedule=[["layers.0", "layers.1"]])
    x, mask = torch.randn(4, 8, requires_grad=True), torch.ones(16)
    for layer in model:
        x, _ = layer(x, mask=mask)
    model[0].norm = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    with pytest.raises(RuntimeError, match="its forward must do the same"):
        x.sum().backward()


def test_evaluation_recomputes_nothing():
    model = checkpoint_activations(Model(), "schedule", schedule=[NAMES]).eval()
    model(torch.randn(4, 8)).sum().backward()
    assert [layer.num_calls for layer in model.layers] == [1] * 5
    assert model.first.weight.grad is not None


def test_a_schedule_of_lists_is_one_of_tuples():
    items = ["l.0", ["l.1", "l.2", ["l.3"]]]
    assert ActivationSchedule(items).to_json() == items
    assert ActivationSchedule.from_json(items).to_json() == items
