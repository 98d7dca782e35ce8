"""Layers whose tokens depend on their places or on each other are refused where a rank has its own tokens only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tp_plan.plan import TensorParallelPlan
from booster.plugins.hybrid_parallel.tp_plan.token_wise_check import (
    check_attention_alone_mixes_tokens,
    check_token_wise,
)


def rotate(x, positions):
    angles = positions[:, None] * torch.linspace(1, 0.1, x.shape[-1] // 2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


# What a layer does to its tokens before attention.
CHANGES = {
    "shift": lambda h: h + F.pad(h, (0, 0, 1, 0))[:, :-1],
    "roll": lambda h: h + torch.roll(h, 1, 1),
    "mean": lambda h: h + h.mean(1, keepdim=True),
    "maximum": lambda h: h + h.amax(1, keepdim=True),
    "first token": lambda h: h + h[:, :1],
    "learned places": lambda h: h + torch.linspace(0, 1, 64)[: h.shape[1], None],
    "length": lambda h: h / h.shape[1],
}


class Placed(nn.Module):
    """A layer of causal attention, all in one forward, with places that the model may pass."""

    def __init__(self, change=None, *, is_rotary=False, after=None):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.change, self.is_rotary, self.after = change, is_rotary, after

    def forward(self, hidden, position_ids=None):
        h = hidden if self.change is None else self.change(hidden)
        query, key, value = (one(h).unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.query, self.key, self.value))
        if self.is_rotary:
            positions = torch.arange(h.shape[1]) if position_ids is None else position_ids[0]
            query, key = rotate(query, positions), rotate(key, positions)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return hidden if self.after is None else self.after(hidden)


class Layer(Placed):
    """The same, to which none are passed."""

    def forward(self, hidden):
        return super().forward(hidden)


class WithTable(Placed):
    """The same, to which something of another name is passed."""

    def forward(self, hidden, table=None):
        return super().forward(hidden, table)


class WithAny(Placed):
    """The same, to which places are passed by a name that its forward does not have."""

    def forward(self, hidden, **kwargs):
        return super().forward(hidden, kwargs.get("position_ids"))


def stacked(layer):
    return nn.ModuleDict({"layers": nn.ModuleList([layer])}), [["layers.0"]]


@pytest.mark.parametrize("name", CHANGES)
def test_attention_must_be_all_that_mixes_tokens(name):
    for layer in (Layer(CHANGES[name]), Layer(after=CHANGES[name])):
        with pytest.raises(ConfigError, match=r"the layer 'layers.0' computes .* other tokens.*pass it to them"):
            check_attention_alone_mixes_tokens(*stacked(layer))


def test_places_must_come_from_outside():
    with pytest.raises(ConfigError, match="queries, keys or values of some tokens from their places"):
        check_attention_alone_mixes_tokens(*stacked(Layer(is_rotary=True)))


@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(torch.tanh),
        Placed(is_rotary=True),
        WithTable(is_rotary=True),
        WithAny(is_rotary=True),
        Layer(lambda h: F.dropout(h, 0.1)),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),  # without attention that a layer alone would show
        nn.Linear(8, 8),
    ],
    ids=[
        "plain",
        "token-wise",
        "places from outside",
        "perhaps",
        "perhaps too",
        "dropout in evaluation",
        "torch's",
        "without attention",
    ],
)
def test_layers_that_mix_tokens_in_attention_alone_pass(layer):
    check_attention_alone_mixes_tokens(*stacked(layer))


class MixesInTraining(Layer):
    """A layer that mixes tokens in training only."""

    def forward(self, x):
        return super().forward(x + x.mean(1, keepdim=True) if self.training else x)


def test_layers_that_mix_tokens_in_training_are_refused():
    with pytest.raises(ConfigError, match=r"outside of attention|from other tokens"):
        check_attention_alone_mixes_tokens(*stacked(MixesInTraining()))


@pytest.mark.parametrize(
    "layer", [Layer(), Layer(CHANGES["shift"]), Layer(is_rotary=True)], ids=["", "shift", "places"]
)
def test_causal_layers_are_not_token_wise(layer):
    model, stacks = stacked(layer)
    with pytest.raises(ConfigError, match="could not be verified to compute tokens independently"):
        check_token_wise(TensorParallelPlan(entries=(), stacks=stacks), model)


def test_layers_without_attention_are_token_wise():
    model, stacks = stacked(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    check_token_wise(TensorParallelPlan(entries=(), stacks=stacks), model)
