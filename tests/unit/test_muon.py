"""Muon in one process: torch's arithmetic, AdamW for the rest, states of torch's, and mistakes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from booster import ConfigError
from booster.optim import Muon
from booster.plugins.sharding.elementwise import require_elementwise


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6)).to(dtype)


def matrices(model):
    return [one for one in model.parameters() if one.dim() == 2]


def vectors(model):
    return [one for one in model.parameters() if one.dim() != 2]


def train(model, optimizers, steps):
    for step in steps:
        inputs = torch.randn(32, 12, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        for one in optimizers:
            one.zero_grad()
        model(inputs).square().mean().backward()
        for one in optimizers:
            one.step()


def assert_same_weights(one, other, tolerance=1e-6):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "original", "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        {"ns_coefficients": (3.0, -4.0, 2.0), "eps": 1e-3},
    ],
)
def test_steps_are_those_of_torchs_muon_and_adamw(settings):
    ours, theirs = make_model(), make_model()
    groups = [{"params": matrices(ours)}, {"params": vectors(ours), "lr": 1e-3, "use_muon": False}]
    optimizer = Muon(groups, lr=0.02, **{"weight_decay": 0.1, **settings})
    decay = settings.get("weight_decay", 0.1)
    references = [
        torch.optim.Muon(matrices(theirs), lr=0.02, **{"weight_decay": 0.1, **settings}),
        torch.optim.AdamW(vectors(theirs), lr=1e-3, weight_decay=decay),
    ]
    # The iteration in bf16 makes of a rounding of the gradients up to 1e-2 of an update: each step starts equal.
    for step in range(5):
        theirs.load_state_dict(ours.state_dict())
        train(ours, [optimizer], [step])
        train(theirs, references, [step])
        for mine, reference in zip(matrices(ours), matrices(theirs), strict=True):
            found = optimizer.state[mine]["momentum_buffer"]
            torch.testing.assert_close(found, references[0].state[reference]["momentum_buffer"])
        assert_same_weights(ours, theirs)


def test_updates_have_singular_values_of_about_one():
    torch.manual_seed(1)
    for shape in ((16, 16), (24, 8), (8, 24)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape)
        Muon([parameter], lr=1.0, weight_decay=0.0, adjust_lr_fn="original", ns_dtype="float32").step()
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        values = torch.linalg.svdvals(parameter.detach()) / scale
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.3


def test_bf16_weights_have_states_of_fp32():
    model = make_model(torch.bfloat16)
    optimizer = Muon([{"params": matrices(model)}, {"params": vectors(model), "use_muon": False}], lr=0.02)
    before = copy.deepcopy(model)
    train(model, [optimizer], range(2))
    assert not any(torch.equal(one, other) for one, other in zip(model.parameters(), before.parameters(), strict=True))
    kept = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert kept == {torch.float32}


def test_states_of_torchs_muon_and_of_its_own_are_loaded():
    ours, theirs = make_model(), make_model()
    reference = torch.optim.Muon(matrices(theirs), lr=0.02)
    train(theirs, [reference], range(3))
    ours.load_state_dict(theirs.state_dict())
    optimizer = Muon(matrices(ours), lr=0.5)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.02
    again, state = copy.deepcopy(ours), copy.deepcopy(optimizer.state_dict())
    for model, one in ((ours, optimizer), (theirs, reference)):
        train(model, [one], [3])
    assert_same_weights(ours, theirs)
    resumed = Muon(matrices(again), lr=0.5)
    resumed.load_state_dict(state)
    train(again, [resumed], [3])
    assert_same_weights(again, ours)
    with pytest.raises(ConfigError, match="load the state of a Muon"):
        resumed.load_state_dict(torch.optim.SGD(matrices(again), lr=0.1, momentum=0.9).state_dict())


def test_what_is_not_a_matrix_is_an_error_that_says_where_it_belongs():
    model = make_model()
    with pytest.raises(ConfigError, match=r"shape \(20,\), which is not a matrix: .*\"use_muon\": False"):
        Muon(model.parameters())
    optimizer = Muon(matrices(model))
    with pytest.raises(ConfigError, match="which is not a matrix"):
        optimizer.add_param_group({"params": vectors(model)})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": vectors(model), "use_muon": False})


def test_torchs_muon_is_refused_with_ours_as_the_advice():
    with pytest.raises(ConfigError, match=r"booster\.optim\.Muon does with the same arguments"):
        require_elementwise(torch.optim.Muon(matrices(make_model())))
