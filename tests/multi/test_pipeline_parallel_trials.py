"""The first batch of a pipeline finds out what a stage computes from values that it does not have."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from harness import RanksFailed, run_ranks
from torch import nn

from booster import Booster
from booster.device import current_device
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device


class Layer(nn.Module):
    """A residual layer that counts and keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.penalty = torch.zeros(())
        self.num_calls, self.lengths = 0, []

    def forward(self, hidden, padding=None):
        self.num_calls += 1
        self.lengths.append(hidden.shape[0])
        inner = torch.relu(self.up(self.norm(hidden)))
        self.penalty = inner.square().mean()
        inner = self.down(inner)
        return hidden + (inner if padding is None else inner.masked_fill(padding[..., None], 0))


class Model(nn.Module):
    """Tokens, layers, a head. What it does besides is told by its kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.codes = nn.Embedding(16, 8).requires_grad_(False)
        self.dropout = nn.Dropout(0.5 if kind == "embedding dropout" else 0.0)
        self.between = nn.Dropout(0.5 if kind == "dropout between layers" else 0.0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        if tokens.dim() != 2 or int(tokens.max()) >= 20:
            raise ValueError("not traced, so that nothing is found before the first batch")
        hidden = self.dropout(self.embed(tokens))
        padding = {"mask of embeddings": hidden.abs().sum(-1) == 0, "mask of tokens": tokens == 0}.get(self.kind)
        noise = torch.rand(tokens.shape, device=tokens.device) if self.kind == "noise" else None
        found = (hidden @ self.codes.weight.T).argmax(-1) if self.kind == "codes" else None
        hidden = hidden.clone() if noise is None else hidden + noise[..., None]
        for layer in self.layers:
            hidden = self.between(layer(hidden, padding))
        outputs = self.head(hidden)
        if found is not None:
            return F.cross_entropy(outputs.flatten(0, 1), found.flatten())
        loss = outputs.square().mean() if noise is None else (outputs - noise[..., None]).square().mean()
        return loss + sum(one.penalty for one in self.layers) if self.kind == "penalties" else loss


def train(kind):
    torch.manual_seed(0)
    model = Model(kind)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(2):
        losses.append(float(booster.execute_pipeline(batches(step), model, lambda loss, _: loss, optimizer)["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    layers = booster.unwrap_model(model).layers
    return losses, [(layer.num_calls, layer.lengths) for layer in layers if layer.num_calls]


def batches(step):
    tokens = torch.randint(1, 20, (4, 6), generator=torch.Generator().manual_seed(step))
    tokens[:, 4:] = 0
    return iter([(tokens.to(current_device()),)])


def in_one_process(kind):
    torch.manual_seed(0)
    model = Model(kind).to(current_device())
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    losses = []
    for step in range(2):
        loss = model(*next(batches(step)))
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", ["plain", "mask of tokens"])
def test_models_that_compute_from_the_batch_train_as_in_one_process_and_run_once(kind):
    losses, calls = zip(*run_ranks(train, 2, kind), strict=True)
    torch.testing.assert_close(losses[0], in_one_process(kind), rtol=1e-4, atol=1e-5)
    # Two steps of two microbatches: what the trials did to the layers was undone.
    assert [one for of_rank in calls for one in of_rank] == [(4, [2] * 4)] * 4


@pytest.mark.parametrize("kind", ["embedding dropout", "dropout between layers"])
def test_random_numbers_that_one_stage_draws_alone_are_no_obstacle(kind):
    losses, _ = zip(*run_ranks(train, 2, kind), strict=True)
    assert losses[0] == losses[1]


REFUSED = {
    "mask of embeddings": r"depends on modules of an earlier stage, by a way around the layers between, such as a mask",
    "codes": r"depends on .*an earlier stage, by a way around the layers between|computes with the parameter 'codes",
    "noise": r"draws random numbers before its layers, such as noise, .*Draw them for the batch",
    "penalties": r"reads 'penalty' of 'layers.0', which its forward sets, and another pipeline stage runs",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_compute_from_what_a_stage_does_not_have_are_refused(kind):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train, 2, kind)
    assert re.search(REFUSED[kind], failed.value.first.summary, re.DOTALL), failed.value.first.summary
