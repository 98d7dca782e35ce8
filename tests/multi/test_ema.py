"""The moving average of weights under every precision and plugin is that of one process."""

from __future__ import annotations

import pytest
import torch
from harness import distributed, preload
from oracles.joined_slices import joined_over_ranks
from strategies import FP32, HALF, Pair, assert_masters_are_shown
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from booster import Booster, Trainer
from booster.errors import ConfigError
from booster.plugins import TorchDDPPlugin
from booster.trainer import EMAHook

preload("booster", "booster.plugins", "booster.trainer")

pytestmark = pytest.mark.on_device


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # which has no states
}


def criterion(outputs, _):
    return (outputs - 1).square().mean()


def train(booster, make_optimizer):
    """Returns the Trainer, its hook, and the average that one process has."""
    pair = Pair(booster, make_optimizer)
    average = AveragedModel(pair.plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    hook = EMAHook(0.5)
    trainer = Trainer(booster, pair.model, pair.optimizer, criterion, hooks=[hook])
    trainer.fit([pair.part(step) for step in range(4)], epochs=1)
    for step in range(4):
        pair.losses(step)[1].backward()
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
        average.update_parameters(pair.plain)
    return pair, trainer, hook, {name.removeprefix("module."): one for name, one in average.named_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (one, kind) if one == "adamw" else pytest.param(one, kind, marks=pytest.mark.slow)
        for one in OPTIMIZERS
        for kind in FP32
    ],
)
@distributed(2)
def test_the_average_is_that_of_one_process(optimizer, kind):
    pair, trainer, hook, expected = train(FP32[kind](), OPTIMIZERS[optimizer])
    with hook.applied():
        found = joined_over_ranks(trainer.model)
        torch.testing.assert_close(
            found, {key: one.detach().cpu() for key, one in expected.items()}, rtol=1e-5, atol=1e-6
        )
    pair.assert_equal()


class Masters:
    """A hook that averages copies of the masters."""

    priority = 100

    def __init__(self):
        self.average = None

    def after_iteration(self, trainer):
        now = copied(trainer)
        if self.average is None:
            self.average = now
        else:
            torch._foreach_lerp_(self.average, now, 0.5)


def copied(trainer):
    return [part.tensor.clone() for part in trainer.model.master_slices()]


@pytest.mark.parametrize("kind", HALF)
@distributed(2)
def test_masters_are_averaged_and_restored_bit_for_bit(kind):
    pair = Pair(HALF[kind](), OPTIMIZERS["adamw"])
    hook, masters = EMAHook(0.5), Masters()
    trainer = Trainer(pair.booster, pair.model, pair.optimizer, criterion, hooks=[hook, masters])
    trainer.fit([pair.part(step) for step in range(4)], epochs=1)
    before = copied(trainer)
    assert before
    with hook.applied():
        assert_masters_are_shown(trainer.model)
        assert all(torch.equal(*both) for both in zip(copied(trainer), masters.average, strict=True))
    assert_masters_are_shown(trainer.model)
    assert all(torch.equal(*both) for both in zip(copied(trainer), before, strict=True))


@distributed(2)
def test_a_parameter_joins_with_its_first_update():
    booster = Booster(plugin=TorchDDPPlugin())
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "late": nn.Linear(2, 1)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.uses_both = model, False

        def forward(self, x):
            return self.parts["used"](x) + (self.parts["late"](x) if self.uses_both else 0.0)

    net = Net()
    net, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    hook = EMAHook(0.5)
    trainer = Trainer(booster, net, optimizer, lambda outputs, _: outputs.mean(), hooks=[hook])
    trainer.fit([torch.ones(1, 2)] * 2, steps=2)
    net.unwrap().uses_both = True
    trainer.fit([torch.ones(1, 2)] * 2, steps=3)
    first = net.unwrap().parts["late"].weight.detach().clone()
    trainer.fit([torch.ones(1, 2)] * 2, steps=4)
    second = net.unwrap().parts["late"].weight.detach().clone()
    with hook.applied():
        torch.testing.assert_close(net.unwrap().parts["late"].weight, (first + second) / 2)


@distributed(2)
def test_an_error_of_all_ranks_leaves_the_weights(tmp_path):
    _, trainer, hook, _ = train(FP32["zero1"](), OPTIMIZERS["adamw"])
    before = joined_over_ranks(trainer.model)
    with pytest.raises(ConfigError, match="ckpt"), hook.applied():
        trainer.booster.save_model(trainer.model, tmp_path / "m.ckpt")
    assert all(torch.equal(one, before[name]) for name, one in joined_over_ranks(trainer.model).items())
    with pytest.raises(ConfigError, match="is entered already"), hook.applied(), hook.applied():
        pass
    assert all(torch.equal(one, before[name]) for name, one in joined_over_ranks(trainer.model).items())


@distributed(2)
def test_wrong_uses_of_the_average():
    for arguments, message in (
        ({"decay": 1.0}, "at least 0 and below 1"),
        ({"every": 0}, "every=0 is not a count"),
        ({"name": "master"}, "other than 'master'"),
    ):
        with pytest.raises(ConfigError, match=message):
            EMAHook(**arguments)
    hook = EMAHook()
    with pytest.raises(ConfigError, match="has no averages yet"), hook.applied():
        pass
    booster = Booster(plugin=TorchDDPPlugin())
    model = nn.Linear(2, 1).bfloat16()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Trainer(booster, model, optimizer, lambda outputs, _: outputs.mean(), hooks=[hook])
    with pytest.raises(ConfigError, match="bfloat16 without fp32 master weights"):
        trainer.fit([torch.ones(1, 2)], epochs=1)
    model = nn.Linear(2, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hook = EMAHook()
    Trainer(booster, model, optimizer, lambda outputs, _: outputs.mean(), hooks=[hook]).fit(
        [torch.ones(1, 2)], epochs=1
    )
    booster.backward(model(torch.ones(1, 2)).mean(), optimizer)
    with pytest.raises(ConfigError, match="in the middle of an accumulation"), hook.applied():
        pass
