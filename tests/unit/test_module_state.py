"""What a forward changes in a model's modules is undone."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
import torch
from torch import nn

from booster.core.module_state import preserved_state


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("unset", None)
        self.count, self.losses, self.seen, self.recent = 0, [1], Counter(a=1), deque([1], maxlen=2)
        self.total = torch.zeros(2)
        self.last, self.nested = {"y": torch.zeros(2)}, {"history": [1]}
        self.generator, self.numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.random = random.Random(1)

    def forward(self, inputs):
        self.count += 1
        self.losses.append(2)
        self.seen["b"] += 1
        self.recent.append(3)
        self.total += 1
        self.mean = inputs.mean(0)
        self.unset = inputs.sum()
        self.cache = inputs
        self.last["y"] = inputs.detach()
        self.nested["history"].append(2)
        self.drawn = [torch.rand(1, generator=self.generator).item(), self.numbers.random(), self.random.random()]
        return self.norm(inputs) * self.weight


def test_everything_is_as_before():
    model = nn.Sequential(Changing())
    losses, total, mean = model[0].losses, model[0].total, model[0].mean
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with preserved_state(model):
        model(torch.randn(4, 2))
        assert model[0].count == 1
    changed = model[0]
    assert (changed.count, changed.losses, changed.seen, list(changed.recent)) == (0, [1], {"a": 1}, [1])
    assert changed.losses is losses
    assert changed.total is total
    assert changed.mean is mean
    assert changed.unset is None
    assert not hasattr(changed, "cache")
    assert torch.equal(changed.last["y"], torch.zeros(2))
    assert changed.nested == {"history": [1]}
    assert torch.equal(total, torch.zeros(2))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    model(torch.randn(4, 2))
    again = changed.drawn
    with preserved_state(model):
        model(torch.randn(4, 2))
    model(torch.randn(4, 2))
    assert again != changed.drawn
    fresh = Changing()
    fresh(torch.randn(4, 2))
    assert again == fresh.drawn
    fresh(torch.randn(4, 2))
    assert changed.drawn == fresh.drawn


def test_sparse_and_resized_buffers_are_as_before():
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("grown", torch.zeros(2))
    with preserved_state(model):
        model.sparse.mul_(2)
        model.grown.resize_(4).fill_(1)
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))
    assert torch.equal(model.grown, torch.zeros(2))


def test_it_is_so_after_an_error_too():
    model = Changing()
    try:
        with preserved_state(model):
            model(torch.randn(4, 3))
    except RuntimeError:
        pass
    assert (model.count, model.losses) == (0, [1])
