"""What layers may compute on a rank's block of features, by running them as on a rank, without ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel_nd.grid import TensorGridShape
from booster.plugins.hybrid_parallel.tensor_parallel_nd.layer_check import verify_layers
from booster.plugins.hybrid_parallel.tensor_parallel_nd.plan import plan_for_grid
from booster.plugins.hybrid_parallel.tp_plan.resolve import choose_plan

GRIDS = {"2d": TensorGridShape.of("2d", 4), "2.5d": TensorGridShape.of("2.5d", 8, 2), "3d": TensorGridShape.of("3d", 8)}
PLAN = {"*.pair.up": "colwise", "*.pair.down": "rowwise"}


class Pair(nn.Module):
    def __init__(self, hidden=8, inner=16):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    """A layer that computes something of its input and of the output of a pair, with a function or a module."""

    def __init__(self, function, module=None):
        super().__init__()
        self.function, self.pair, self.norm = function, Pair(), nn.LayerNorm(8)
        self.other = module() if module is not None else None

    def forward(self, x):
        y = self.pair(self.norm(x))
        return x + (self.function(x, y) if self.other is None else self.other(y))


class OfWeights(nn.Module):
    """A module with one value per feature."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.function(x, self.weight)


def rotated(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def centered(x, weight):
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance) * weight


MIXING = {
    "number of features": lambda x, y: y / math.sqrt(x.shape[-1]),
    "size": lambda x, y: y * x.size(-1),
    "flip": lambda x, y: y.flip(-1),
    "roll": lambda x, y: y.roll(1, -1),
    "rotation": lambda x, y: rotated(y),
    "first feature": lambda x, y: y * y[..., :1],
    "places": lambda x, y: y * torch.linspace(0.5, 1, y.shape[-1], dtype=y.dtype),
    "cosine similarity": lambda x, y: y * F.cosine_similarity(x, y, dim=-1).unsqueeze(-1),
    "product": lambda x, y: y * (x.unsqueeze(-2) @ y.unsqueeze(-1)).squeeze(-1),
    "einsum": lambda x, y: y * torch.einsum("btd,btd->bt", x, y).unsqueeze(-1),
    "product of features": lambda x, y: y @ (y.transpose(1, 2) @ y),
    "norm of groups": lambda x, y: rms(y.unflatten(-1, (2, -1))).flatten(-2),
    "mean of tokens": lambda x, y: y - y.flatten(0, 1).mean(-1).view(*y.shape[:2], 1),
    "Fourier transform": lambda x, y: torch.fft.fft(y).real,
}
MIXING_MODULES = {
    "variance": centered,
    "gate": lambda x, weight: x * torch.sigmoid((x @ weight).unsqueeze(-1)),
    "norm of groups": lambda x, weight: rms(x.unflatten(-1, (2, -1))).flatten(-2) * weight,
}
SEPARATE = {
    "functions": lambda x, y: torch.lerp(x, y, 0.5) * 2 + F.gelu(y),
    "mean": lambda x, y: y - y.mean(-1, keepdim=True),
    "RMS norm": lambda x, y: rms(y),
    "norms": lambda x, y: F.layer_norm(y, y.shape[-1:]) + F.rms_norm(x, (x.shape[-1],)),
    "other token": lambda x, y: y.roll(1, 1),
}
MEANS = {
    "RMS norm": lambda x, weight: rms(x) * weight,
    "RMS norm of tokens": lambda x, weight: (rms(x.flatten(0, 1)) * weight).view_as(x),
    "scale": lambda x, weight: x * weight,
}


def verify(layer, mode, plan=PLAN):
    model, grid = nn.Sequential(layer, copy.deepcopy(layer)), GRIDS[mode]
    resolved = plan_for_grid(choose_plan(model, tp_size=grid.side, plan=plan), model, grid)
    assert resolved.divided_stacks
    return verify_layers(resolved, model, grid)


def assert_refused(layer, mode):
    message = "'0' computes something that depends on all of its features|'0.*' calls .* but tp_mode="
    with pytest.raises(ConfigError, match=f"(?s)({message}).*use tp_mode='1d'"):
        verify(layer, mode)


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_features(name):
    assert_refused(Layer(MIXING[name]), "2d")


@pytest.mark.parametrize("name", MIXING_MODULES)
def test_modules_that_mix_features(name):
    assert_refused(Layer(None, lambda: OfWeights(MIXING_MODULES[name])), "2d")


@pytest.mark.parametrize("mode", ["2.5d", "3d"])
def test_other_grids(mode):
    for name in ("number of features", "rotation", "first feature"):
        assert_refused(Layer(MIXING[name]), mode)
    for name in SEPARATE:
        assert verify(Layer(SEPARATE[name]), mode) == ()


@pytest.mark.parametrize("name", SEPARATE)
def test_functions_of_each_feature_and_means(name):
    assert verify(Layer(SEPARATE[name]), "2d") == ()


@pytest.mark.parametrize("name", MEANS)
def test_modules_of_each_feature_and_means(name):
    assert verify(Layer(None, lambda: OfWeights(MEANS[name])), "2d") == ()


def test_buffers_of_features():
    class Scaled(Layer):
        def __init__(self):
            super().__init__(lambda x, y: y * self.scale)
            self.register_buffer("scale", torch.ones(8))

    assert_refused(Scaled(), "2d")


def test_layers_that_compute_something_else_in_training():
    class Training(Layer):
        def __init__(self):
            super().__init__(lambda x, y: y.flip(-1) if self.training else y)

    assert_refused(Training(), "2d")


def test_every_kind_of_layer_of_a_stack():
    grid, mixing = GRIDS["2d"], OfWeights(MIXING_MODULES["gate"])
    model = nn.Sequential(Layer(SEPARATE["mean"]), Layer(None, lambda: mixing))
    resolved = plan_for_grid(choose_plan(model, tp_size=grid.side, plan=PLAN), model, grid)
    with pytest.raises(ConfigError, match="the layer '1' computes something"):
        verify_layers(resolved, model, grid)


def test_layers_with_random_numbers_in_evaluation_are_not_compared():
    (note,) = verify(Layer(lambda x, y: y + torch.rand_like(y)), "2d")
    assert "not verified: it draws random numbers in evaluation" in note


def test_a_note_says_which_layers_are_not_verified():
    class WithArgument(Layer):
        def forward(self, x, scale):
            return super().forward(x) * scale

    (note,) = verify(WithArgument(SEPARATE["mean"]), "2d")
    assert "not verified: its forward has the further argument 'scale'" in note
