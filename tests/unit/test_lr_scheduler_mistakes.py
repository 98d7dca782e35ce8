"""What can't work is refused with what to write instead, and nothing is touched."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from lr_scheduler_cases import CASES, Halves, N, optimizer, take
from torch import nn
from torch.optim import lr_scheduler as theirs

from booster import ConfigError
from booster.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    ExponentialLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LambdaLR,
    LinearWarmupLR,
    MultiplicativeLR,
    MultiStepLR,
    MultiStepWarmupLR,
    OneCycleLR,
    PolynomialLR,
    PolynomialWarmupLR,
    StepLR,
)

MISTAKES = [
    (partial(CosineAnnealingLR, total_steps=0), "total_steps=0 is less than 1"),
    (partial(CosineAnnealingLR, total_steps=10.0), r"total_steps=10.0 is not an integer.* right after the optimizer"),
    (partial(CosineAnnealingLR, total_steps=True), "total_steps=True is not an integer"),
    (partial(MultiStepLR, total_steps=[30, 80]), r"total_steps=\[30, 80\] is not an integer"),
    (partial(LambdaLR, total_steps=lambda step: 1.0), "before the arguments of torch's scheduler of this name"),
    (partial(ExponentialLR, total_steps=0.95), "total_steps=0.95 is not an integer"),
    (partial(LinearWarmupLR, total_steps=10, warmup_steps=10), "leaves none of total_steps=10.* from 0 to 9"),
    (partial(CosineAnnealingWarmupLR, total_steps=10, warmup_steps=11), "warmup_steps=11 leaves none"),
    (partial(FlatAnnealingWarmupLR, total_steps=10, warmup_steps=-1), "warmup_steps=-1 is less than 0"),
    (partial(PolynomialWarmupLR, total_steps=10, warmup_steps=0.1), r"give int\(0.1 \* total_steps\)"),
    (partial(CosineAnnealingLR, total_steps=10, eta_min=-1), "eta_min=-1 is out of range"),
    (partial(CosineAnnealingLR, total_steps=10, eta_min=math.nan), "eta_min=nan is out of range"),
    (partial(CosineAnnealingLR, total_steps=10, eta_min="0"), "eta_min='0' is out of range"),
    (partial(CosineAnnealingLR, total_steps=10, eta_min=0.05), "eta_min=0.05 is more than.* 0.03 of param group 1"),
    (partial(FlatAnnealingWarmupLR, total_steps=10, eta_min=0.05), "would increase to it"),
    (
        partial(PolynomialLR, total_steps=10, end_lr=0.5),
        "end_lr=0.5 is more than the learning rate 0.1 of param group 0",
    ),
    (partial(PolynomialWarmupLR, total_steps=10, end_lr=0.5), "such as end_lr=0.0"),
    (partial(PolynomialLR, total_steps=10, power=0), "power=0 is out of range: give .* more than 0"),
    (partial(FlatAnnealingLR, total_steps=10, pct_start=1.0), "pct_start=1.0 is.* less than 1"),
    (partial(FlatAnnealingLR, total_steps=10, pct_start=72), "pct_start=72 is"),
    (partial(MultiStepLR, total_steps=10), r"milestones=None has no step.* milestones=\[5, 7\]"),
    (partial(MultiStepLR, total_steps=10, milestones=[]), r"milestones=\[\] has no step"),
    (partial(MultiStepLR, total_steps=10, milestones=5), "milestones=5 has no step"),
    (
        partial(MultiStepLR, total_steps=10, milestones=[8, 3]),
        r"not in ascending order: give milestones=\[3, 8\]",
    ),
    (partial(MultiStepLR, total_steps=10, milestones=[3, 10]), "10 is after the last step.* from 1 to 9"),
    (partial(MultiStepLR, total_steps=10, milestones=[0, 5]), "0 is before the first step"),
    (partial(MultiStepLR, total_steps=10, milestones=[0.5, 0.8]), r"milestones\[0\]=0.5 is not an integer number"),
    (
        partial(MultiStepWarmupLR, total_steps=10, warmup_steps=4, milestones=[3, 8]),
        "3 is within warmup",
    ),
    (partial(MultiStepLR, total_steps=10, milestones=[5], gamma=0), "gamma=0 is out of range"),
    (partial(StepLR, total_steps=10, step_size=0), "step_size=0 is less than 1"),
    (partial(StepLR, total_steps=10, step_size=2, gamma=math.inf), "gamma=inf is out of range"),
    (partial(LambdaLR, total_steps=10), "lr_lambda=None is not callable"),
    (partial(MultiplicativeLR, total_steps=10, lr_lambda=0.9), "lr_lambda=0.9 is not callable"),
    (
        partial(LambdaLR, total_steps=10, lr_lambda=[lambda step: 1.0]),
        "1 functions, but the optimizer has 2 param groups",
    ),
    (partial(LambdaLR, total_steps=10, lr_lambda=math.exp), "has no __dict__"),
    (partial(OneCycleLR, total_steps=10, pct_start=1.2), "pct_start=1.2 is not a fraction"),
    (partial(OneCycleLR, total_steps=10, pct_start=0.1), "is one step"),
    (partial(OneCycleLR, total_steps=10, anneal_strategy="exp"), "anneal_strategy='exp' is unknown: give 'cos'"),
    (partial(OneCycleLR, total_steps=10, div_factor=0), "div_factor=0 is out of range"),
    (partial(OneCycleLR, total_steps=10, max_momentum=1.0), "must be less than 1"),
    (partial(CosineAnnealingLR, total_steps=10, last_epoch=4), "param group 0 has no 'initial_lr'"),
    (partial(OneCycleLR, total_steps=10, last_epoch=4), "param group 0 has no 'initial_lr'"),
    (
        partial(CosineAnnealingLR, total_steps=10, last_epoch=10),
        "last_epoch=10 is not a step of total_steps=10.* up to 9",
    ),
    (partial(CosineAnnealingLR, total_steps=10, last_epoch=-2), "last_epoch=-2 is not a step"),
]


@pytest.mark.parametrize(("make", "told"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_a_mistake_is_told_and_the_optimizer_untouched(make, told):
    of = optimizer()
    before = copy.deepcopy(of.state_dict())
    with pytest.raises(ConfigError, match=told):
        make(of)
    assert of.state_dict() == before
    assert "step" not in vars(of)  # torch's schedulers put themselves around it


@pytest.mark.parametrize("given", [None, nn.Linear(1, 1), [nn.Parameter(torch.zeros(1))]])
@pytest.mark.parametrize("name", [name for name in CASES if name != "objects"])  # which asks it for its groups
def test_what_is_no_optimizer_is_refused(name, given):
    with pytest.raises(ConfigError, match=f"a {type(given).__name__} in place of an optimizer"):
        CASES[name](given)


def test_a_cycle_needs_a_momentum():
    of = torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="Adagrad has neither momentum nor betas to cycle: give cycle_momentum=False"):
        OneCycleLR(of, N)
    take(OneCycleLR(of, N, cycle_momentum=False), N)


@pytest.mark.parametrize("name", CASES)
def test_a_group_without_a_learning_rate_is_told(name):
    of = optimizer()
    of.param_groups[1]["lr"] = None
    with pytest.raises(ConfigError, match="param group 1 has lr=None"):
        CASES[name](of)


# States.

OTHERS = [
    (CosineAnnealingLR, (10,), (20,), "with total_steps=10, but this one has total_steps=20.* last_epoch=2"),
    (CosineAnnealingLR, (10, 0.01), (10, 0.02), "with eta_min=0.01, but this one has eta_min=0.02"),
    (LinearWarmupLR, (10, 2), (12, 3), "with total_steps=10, warmup_steps=2, but"),
    (MultiStepLR, (10, [3, 5]), (10, [3, 6]), r"milestones=\[3, 5\], but this one has milestones=\[3, 6\]"),
    (MultiStepWarmupLR, (10, 2, [3, 5]), (10, 2, [3, 6]), r"milestones=\[3, 5\], but"),
    (OneCycleLR, (10, 0.3, "cos"), (10, 0.3, "linear"), "anneal_strategy='cos', but"),
    (OneCycleLR, (10, 0.3, "cos", False), (10,), "cycle_momentum=False, but"),
    (StepLR, (10, 2), (10, 3), "step_size=2, but this one has step_size=3"),
    (PolynomialLR, (10, 0.0), (10,), "end_lr=0.0, but this one has end_lr=0.0001"),
]


@pytest.mark.parametrize(("scheduler", "saved", "given", "told"), OTHERS)
def test_a_state_of_other_settings_is_refused(scheduler, saved, given, told):
    one, other = scheduler(optimizer(), *saved), scheduler(optimizer(), *given)
    take(one, 3)
    _assert_refused(other, one.state_dict(), told)


def _assert_refused(scheduler, state, told):
    before = repr((scheduler.state_dict(), scheduler.optimizer.state_dict()))
    with pytest.raises(ConfigError, match=told):
        scheduler.load_state_dict(state)
    assert repr((scheduler.state_dict(), scheduler.optimizer.state_dict())) == before


def test_states_of_others_are_refused():
    of = optimizer()
    _assert_refused(CosineAnnealingLR(of, N), theirs.CosineAnnealingLR(optimizer(), N).state_dict(), "no 'total_steps'")
    _assert_refused(StepLR(of, N), {}, "no 'total_steps', so it is not of booster.lr_scheduler.StepLR")
    _assert_refused(StepLR(of, N), StepLR(optimizer([0.1]), N).state_dict(), "1 param groups, but this one has 2")
    _assert_refused(StepLR(optimizer([0.1]), N), StepLR(of, N).state_dict(), "2 param groups, but this one has 1")
    _assert_refused(StepLR(of, N), StepLR(of, N).state_dict() | {"last_epoch": "x"}, "last_epoch='x'")
    one = OneCycleLR(optimizer(), N)
    _assert_refused(OneCycleLR(optimizer(kind=torch.optim.AdamW), N), one.state_dict(), "no 'betas' of a param group")
    objects = LambdaLR(optimizer(), N, Halves(2)).state_dict()
    _assert_refused(
        LambdaLR(optimizer(), N, lambda step: 1.0), objects, "lr_lambda 0 has 'period', which a function can't"
    )


def test_a_state_overwrites_no_method():
    scheduler = StepLR(optimizer(), N)
    scheduler.load_state_dict(scheduler.state_dict() | {"step": "x", "get_lr": "x", "optimizer": None})
    expected = StepLR(optimizer(), N)
    for one in (scheduler, expected):
        take(one, 2)
    assert scheduler.get_last_lr() == expected.get_last_lr()
