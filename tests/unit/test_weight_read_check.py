"""Layers that read sharded weights outside of the modules that were verified with shards are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tp_plan.resolve import choose_plan

USER_PLAN = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    """A layer that may compute something else with its MLP's weights."""

    def __init__(self, read):
        super().__init__()
        self.norm, self.mlp, self.read = nn.LayerNorm(8), MLP(), read

    def forward(self, x):
        x = x + self.mlp(self.norm(x))
        return x + self.read(self, x)


READS = {
    "product": ("up.weight", lambda layer, x: F.linear(x, layer.mlp.up.weight.t() @ layer.mlp.up.weight)),
    "norm": ("down.weight", lambda layer, x: x * layer.mlp.down.weight.norm()),
    "bias": ("up.bias", lambda layer, x: x * layer.mlp.up.bias.sum()),
    "training": ("up.weight", lambda layer, x: x * layer.mlp.up.weight.sum() if layer.training else x),
    "detached": ("up.weight", lambda layer, x: x * layer.mlp.up.weight.data.sum()),
}


def stacked(read):
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList([Layer(read), Layer(read)])})


@pytest.mark.parametrize("shards_sequence", [False, True], ids=["features", "sequence"])
@pytest.mark.parametrize("plan", [None, USER_PLAN], ids=["derived", "of the user"])
@pytest.mark.parametrize("name", READS)
def test_reads_of_sharded_weights_are_refused(name, plan, shards_sequence):
    parameter, read = READS[name]
    with pytest.raises(
        ConfigError, match=rf"'layers.0' reads the parameter 'layers.0.mlp.{parameter}'.*call the module"
    ):
        choose_plan(stacked(read), tp_size=2, plan=plan, shards_sequence=shards_sequence)


@pytest.mark.parametrize(
    "read",
    [
        lambda layer, x: x,
        lambda layer, x: x.to(layer.mlp.up.weight.dtype),
        lambda layer, x: x * layer.norm.weight,
        lambda layer, x: layer.norm(x) @ torch.eye(8).to(layer.mlp.up.weight),
    ],
    ids=["none", "dtype", "unsharded", "device"],
)
@pytest.mark.parametrize("plan", [None, USER_PLAN], ids=["derived", "of the user"])
def test_other_layers_pass(read, plan):
    found = choose_plan(stacked(read), tp_size=2, plan=plan, shards_sequence=True)
    assert {entry.name for entry in found.entries if entry.style == "rowwise"} == {
        "layers.0.mlp.down",
        "layers.1.mlp.down",
    }


class OwnForward(nn.Module):
    """A layer that is verified with shards as a whole, and reads a weight whose rows are its features."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)) * self.up.weight.norm(dim=1))


def test_reads_in_a_layer_that_was_verified_with_shards_pass():
    model = nn.ModuleDict({"layers": nn.ModuleList([OwnForward(), OwnForward()])})
    found = choose_plan(model, tp_size=2, plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    assert {entry.name for entry in found.entries if entry.style == "colwise"} == {"layers.0.up", "layers.1.up"}
