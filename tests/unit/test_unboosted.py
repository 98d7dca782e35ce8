"""Optimizers, boosted and plain: what they keep is stored whole, and they go on as if they had never stopped."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop

from booster import Booster
from booster.errors import CheckpointError, ConfigError

# Every variant that runs on a CPU; flags are part of the state, as in torch's own state_dict.
VARIANTS = {
    "Adam": (Adam, {}),
    "Adam amsgrad": (Adam, {"amsgrad": True}),
    "Adam foreach": (Adam, {"foreach": True}),
    "Adam fused": (Adam, {"fused": True}),
    "AdamW": (AdamW, {"weight_decay": 0.1}),
    "AdamW foreach": (AdamW, {"foreach": True}),
    "AdamW fused": (AdamW, {"fused": True}),
    "AdamW maximize": (AdamW, {"maximize": True}),
    "AdamW tensor lr": (AdamW, {"lr": torch.tensor(0.1)}),
    "SGD": (SGD, {}),
    "SGD momentum": (SGD, {"momentum": 0.9}),
    "SGD nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD fused": (SGD, {"momentum": 0.9, "fused": True}),
    "Adagrad": (Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "Adagrad fused": (Adagrad, {"fused": True}),
    "RMSprop": (RMSprop, {}),
    "RMSprop centered": (RMSprop, {"centered": True, "momentum": 0.5}),
    "RMSprop foreach": (RMSprop, {"foreach": True}),
}


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def make_optimizer(model, variant, *, is_named):
    cls, options = VARIANTS[variant]
    options = {"lr": 0.05} | {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    named = list(model.named_parameters())
    groups = [{"params": named[1:3]}, {"params": named[:1], "lr": options["lr"] * 0.5}]  # the last bias in none
    if not is_named:
        groups = [group | {"params": [parameter for _, parameter in group["params"]]} for group in groups]
    return cls(groups, **options)


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 10).view(2, 5) * (step + 1)).square().sum().backward()
        optimizer.step()


def assert_same_state(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        assert state.keys() == right["state"][index].keys()
        for key, value in state.items():
            other = right["state"][index][key]
            assert type(value) is type(other), key
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), key
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.device, value.shape) == (other.dtype, other.device, other.shape), key


@pytest.mark.parametrize("form", ["file", "directory"])
@pytest.mark.parametrize("is_named", [False, True], ids=["numbered", "named"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plain_optimizer_goes_on_exactly(tmp_path, variant, is_named, form):
    booster = Booster(device="cpu")
    model = make_model()
    optimizer = make_optimizer(model, variant, is_named=is_named)
    train(model, optimizer, 3)
    path = tmp_path / ("o.safetensors" if form == "file" else "o")
    booster.save_optimizer(optimizer, path, shard=form == "directory")
    again = make_model()
    again.load_state_dict(model.state_dict())
    other = make_optimizer(again, variant, is_named=is_named)
    train(again, other, 1)  # a state to be replaced
    again.load_state_dict(model.state_dict())
    booster.load_optimizer(other, path)
    assert_same_state(optimizer, other)
    train(model, optimizer, 3)
    train(again, other, 3)
    assert_same_state(optimizer, other)
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_boosted_optimizer_goes_on_exactly(tmp_path, variant):
    jobs = []
    for _ in range(2):
        booster = Booster(device="cpu")
        model = make_model()
        jobs.append(booster.boost(model, make_optimizer(model, variant, is_named=False))[:2])
    train(*jobs[0], 3)
    booster.save(tmp_path / "c", *jobs[0])
    booster.load(tmp_path / "c", *jobs[1])
    assert_same_state(jobs[0][1], jobs[1][1])
    for job in jobs:
        train(*job, 3)
    assert_same_state(jobs[0][1], jobs[1][1])
    for left, right in zip(*(job[0].parameters() for job in jobs), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("is_saved_plain", [False, True])
def test_names_make_plain_and_boosted_checkpoints_alike(tmp_path, is_saved_plain):
    booster = Booster(device="cpu")
    models = [make_model(), make_model()]
    plain = make_optimizer(models[0], "AdamW", is_named=True)
    model, boosted, *_ = booster.boost(models[1], make_optimizer(models[1], "AdamW", is_named=False))
    saved, loaded = (plain, boosted) if is_saved_plain else (boosted, plain)
    train(models[0] if is_saved_plain else model, saved, 2)
    booster.save_optimizer(saved, tmp_path / "o", shard=True)
    booster.load_optimizer(loaded, tmp_path / "o")
    index = json.loads((tmp_path / "o" / "optimizer.safetensors.index.json").read_text())
    assert "2.weight.exp_avg" in index["weight_map"]
    left, right = saved.state_dict()["state"], loaded.state_dict()["state"]
    for number, state in left.items():
        assert all(torch.equal(value, right[number][key]) for key, value in state.items())


def test_a_numbered_checkpoint_into_a_named_optimizer(tmp_path):
    booster = Booster(device="cpu")
    model = make_model()
    numbered, named = (make_optimizer(model, "AdamW", is_named=is_named) for is_named in (False, True))
    train(model, numbered, 1)
    booster.save_optimizer(numbered, tmp_path / "o.safetensors")
    with pytest.raises(CheckpointError, match=r"'0.bias', '2.weight' are missing"):
        booster.load_optimizer(named, tmp_path / "o.safetensors")
    assert not named.state


def test_stored_masters_fill_a_plain_optimizers_parameters(tmp_path):
    booster = Booster(device="cpu", mixed_precision="fp16_naive")
    raw = make_model()
    model, boosted, *_ = booster.boost(raw, AdamW(raw.named_parameters(), lr=0.1))
    booster.backward(model(torch.ones(2, 5)).sum(), boosted)
    boosted.step()
    booster.save_optimizer(boosted, tmp_path / "o", shard=True)
    plain_model = make_model()
    plain = AdamW(plain_model.named_parameters(), lr=0.5)
    booster.load_optimizer(plain, tmp_path / "o")
    masters = {part.name: part.tensor for part in boosted.checkpoint_state().slices()}
    for name, parameter in plain_model.named_parameters():
        assert torch.equal(parameter, masters[f"{name}.master"])
    assert plain.param_groups[0]["lr"] == 0.1


def test_lbfgs_says_why_it_cant(tmp_path):
    booster = Booster(device="cpu")
    model = make_model()
    optimizer = LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(CheckpointError, match=r"LBFGS has a list as state .*save the model alone"):
        booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
    assert not (tmp_path / "o").exists()


def test_plain_gradients_are_their_users(tmp_path):
    booster = Booster(device="cpu")
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 1)  # leaves its gradients behind
    booster.save(tmp_path / "c", optimizer=optimizer)
    assert not list((tmp_path / "c").glob("gradients*"))
    before = [parameter.grad.clone() for parameter in model.parameters()]
    booster.load(tmp_path / "c", optimizer=optimizer)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_what_is_no_optimizer(tmp_path):
    booster = Booster(device="cpu")
    model = make_model()
    raw = SGD(model.parameters(), lr=0.1)
    booster.boost(model, raw)
    for wrong in (raw, model, None):
        with pytest.raises(ConfigError, match=r"pass the optimizer that boost\(\) returned"):
            booster.save_optimizer(wrong, tmp_path / "o", shard=True)
