"""Weights that are computed of other parameters (weight_norm, spectral_norm, parametrizations), under every plugin."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from torch import nn

from booster import Booster
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device

P = torch.nn.utils.parametrizations
KINDS = {
    "weight_norm": P.weight_norm,
    "spectral_norm": P.spectral_norm,
    "orthogonal": P.orthogonal,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
}
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
PLUGINS = {
    "tp 2": lambda: HybridParallelPlugin(tp_size=2, plan=PLAN, precision="fp32"),
    "pp 2": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=1, precision="fp32"),
    "hybrid zero 1": lambda: HybridParallelPlugin(zero_stage=1, precision="fp32"),
    "ddp": TorchDDPPlugin,
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "fsdp": TorchFSDPPlugin,
}
STEPS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(kind: str, places: list[str]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
        for place in places:
            KINDS[kind](model.get_submodule(place))
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


def criterion(outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (outputs - x.sum(dim=-1, keepdim=True)).square().mean()


def train(plugin: str, kind: str, places: list[str]) -> list[float]:
    booster, raw = Booster(plugin=PLUGINS[plugin]()), build(kind, places)
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.05))
    losses = []
    for step in range(STEPS):
        mine = batch(step).chunk(booster.plugin.dp_size)[booster.plugin.dp_rank].to(booster.device)
        if plugin == "pp 2":
            loss = booster.execute_pipeline(iter([mine]), model, criterion, optimizer)["loss"]
        else:
            loss = criterion(model(mine), mine)
            booster.backward(loss, optimizer)
        losses.append(math.nan if loss is None else loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_alone(kind: str, places: list[str]) -> list[float]:
    model = build(kind, places)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        loss = criterion(model(batch(step)), batch(step))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


# Tensor parallelism leaves these layers whole; that it refuses to divide them is tested with its plans.
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("plugin", "kind"),
    [
        pytest.param(
            plugin, kind, marks=[] if "p 2" in plugin and kind in ("weight_norm", "spectral_norm") else pytest.mark.slow
        )
        for plugin in PLUGINS
        for kind in KINDS
    ],
)
def test_computed_weights_train_as_in_one_process(plugin, kind):
    places = ["head", "embed"] if plugin == "tp 2" else ["head", "layers.0.up", "layers.3.down"]
    expected = train_alone(kind, places)
    of_ranks = torch.tensor(run_ranks(train, 2, plugin, kind, places), dtype=torch.float64)
    # The mean over the ranks that know it: each has a part of the batch, or all, or is a stage without the loss.
    torch.testing.assert_close(of_ranks.nanmean(dim=0), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)
