"""fp8: which layers it takes, and that training with it learns what fp32 learns."""

from __future__ import annotations

import pytest
import torch
from oracles.precision_training import batches, boost, make_net
from torch import nn

from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.kernels.float8 import native_problem
from booster.mixed_precision import FP8MixedPrecision
from booster.mixed_precision.fp8 import Float8Linear

# fp8


def test_fp8_changes_linear_layers_in_place():
    model = make_net()
    names = list(model.state_dict())
    parameters = list(model.parameters())
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    boosted, _, _ = boost(FP8MixedPrecision(), model)
    assert type(model.first) is type(model.middle) is type(model.last) is Float8Linear
    assert model.again is model.middle
    assert isinstance(model.first, nn.Linear)
    assert list(boosted.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    boosted(next(batches())[0])
    assert calls == [1]
    root = nn.Linear(3, 3)
    FP8MixedPrecision().prepare(root)
    assert type(root) is Float8Linear


def test_fp8_filter_and_subclasses():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 3), Own(3, 3), nn.Linear(3, 3))
    FP8MixedPrecision(module_filter=lambda name, module: name != "2").prepare(model)
    assert [type(module) for module in model] == [Float8Linear, Own, nn.Linear]
    with pytest.raises(ConfigError, match=r"no nn\.Linear"):
        FP8MixedPrecision().prepare(nn.Conv1d(2, 2, 1))
    with pytest.raises(ConfigError, match="module_filter selected no"):
        FP8MixedPrecision(module_filter=lambda name, module: False).prepare(nn.Linear(2, 2))


def train_classifier(precision):
    """Returns the losses of 60 steps of a small classifier."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 33), nn.GELU(), nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 5))
    x = torch.randn(40, 9)
    target = x[:, :5].argmax(1)
    optim = torch.optim.AdamW(net.parameters(), lr=0.01)
    if precision is None:
        boosted = ModelWrapper(net)
        model, optimizer, criterion = boosted, OptimizerWrapper(optim, boosted), nn.CrossEntropyLoss()
    else:
        model, optimizer, criterion = boost(precision, net, optim, nn.CrossEntropyLoss())
    losses = []
    for _ in range(60):
        loss = criterion(model(x), target)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["dynamic", "rowwise"])
@pytest.mark.parametrize("emulate", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_fp8_learns_as_fp32_does(emulate, recipe):
    problem = native_problem("cpu", torch.float8_e5m2, torch.float8_e4m3fn)
    if emulate is False and problem is not None:
        pytest.skip(problem[:200])
    expected = train_classifier(None)
    losses = train_classifier(FP8MixedPrecision(recipe, emulate=emulate))
    assert expected[-1] < 0.1 * expected[0]
    # e4m3 rounds each factor by up to 2**-4; over sums of tens of terms the errors average out to a few percent of a
    # logit, which moves the loss by a few hundredths.
    assert losses != expected
    assert losses[0] == pytest.approx(expected[0], abs=0.03)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 0.1
    assert losses[-1] < 0.15 * losses[0]


def test_fp8_demands_what_the_device_has(monkeypatch):
    monkeypatch.setattr("booster.mixed_precision.fp8.native_problem", lambda *_, **__: "no such instruction")
    with pytest.raises(ConfigError, match="no such instruction"):
        boost(FP8MixedPrecision(emulate=False), make_net())
