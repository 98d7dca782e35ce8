"""Every schedule is the curve that is written out here, and torch's where torch has it."""

from __future__ import annotations

from math import cos, pi

import numpy as np
import pytest
import torch
from lr_scheduler_cases import CASES, N, hyperparameters, jump, learning_rates, optimizer, take
from torch.optim import AdamW
from torch.optim import lr_scheduler as theirs

from booster import lr_scheduler as ours

# By hand, for a learning rate of 1: those of all steps, and the one after them.
CURVES = {
    "cosine": (
        lambda o: ours.CosineAnnealingLR(o, 4, 0.2),
        [1.0, 0.2 + 0.4 * (1 + cos(pi / 4)), 0.6, 0.2 + 0.4 * (1 + cos(3 * pi / 4)), 0.2],
    ),
    "cosine of one step": (lambda o: ours.CosineAnnealingLR(o, 1), [1.0, 0.0]),
    "cosine after warm-up": (
        lambda o: ours.CosineAnnealingWarmupLR(o, 6, 2, 0.2),
        [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + cos(pi / 4)), 0.6, 0.2 + 0.4 * (1 + cos(3 * pi / 4)), 0.2],
    ),
    "flat": (lambda o: ours.FlatAnnealingLR(o, 5, 0.6), [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]),
    "flat, rounded down": (lambda o: ours.FlatAnnealingLR(o, 4), [1.0, 1.0, 1.0, 0.5, 0.0]),
    "not flat": (lambda o: ours.FlatAnnealingLR(o, 2, 0), [1.0, 0.5, 0.0]),
    "flat after warm-up": (
        lambda o: ours.FlatAnnealingWarmupLR(o, 8, 4, 0.5, 0.2),
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.6, 0.2],
    ),
    "linear": (
        lambda o: ours.LinearWarmupLR(o, 8, 4),
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0],
    ),
    "linear without warm-up": (lambda o: ours.LinearWarmupLR(o, 4), [1.0, 0.75, 0.5, 0.25, 0.0]),
    "milestones": (lambda o: ours.MultiStepLR(o, 5, [1, 3]), [1.0, 0.1, 0.1, 0.01, 0.01, 0.01]),
    "one milestone twice": (lambda o: ours.MultiStepLR(o, 3, [2, 2], 0.5), [1.0, 1.0, 0.25, 0.25]),
    "milestones after warm-up": (
        lambda o: ours.MultiStepWarmupLR(o, 6, 2, [3, 5], 0.5),
        [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25],
    ),
    "a milestone at the warm-up's end": (
        lambda o: ours.MultiStepWarmupLR(o, 4, 2, [2], 0.5),
        [0.5, 1.0, 0.5, 0.5, 0.5],
    ),
    # Up in pct_start * total_steps - 1 = 2 steps, down in the 5 that are left; it ends with the last step.
    "one cycle": (
        lambda o: ours.OneCycleLR(o, 8, 3 / 8, "linear", div_factor=5, final_div_factor=2),
        [0.2, 0.6, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1],
    ),
    "polynomial": (lambda o: ours.PolynomialLR(o, 4, 0.2, 2.0), [1.0, 0.65, 0.4, 0.25, 0.2]),
    "polynomial after warm-up": (
        lambda o: ours.PolynomialWarmupLR(o, 6, 2, 0.2, 2.0),
        [0.5, 1.0, 1.0, 0.65, 0.4, 0.25, 0.2],
    ),
    "function": (lambda o: ours.LambdaLR(o, 3, lambda step: 1 / (1 + step)), [1.0, 1 / 2, 1 / 3, 1 / 4]),
    "factors": (lambda o: ours.MultiplicativeLR(o, 3, lambda step: 1 / (1 + step)), [1.0, 1 / 2, 1 / 6, 1 / 24]),
    "steps": (lambda o: ours.StepLR(o, 5, 2, 0.5), [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
    "exponential": (lambda o: ours.ExponentialLR(o, 3, 0.5), [1.0, 0.5, 0.25, 0.125]),
    "constant": (lambda o: ours.ExponentialLR(o, 3), [1.0, 1.0, 1.0, 1.0]),
}


def test_all_fourteen_are_here():
    assert len(ours.__all__) == 14
    made = {type(make(optimizer())).__name__ for make in CASES.values()}
    assert made == set(ours.__all__) == {type(make(optimizer([1.0]))).__name__ for make, _ in CURVES.values()}


@pytest.mark.parametrize("name", CURVES)
def test_learning_rates_by_hand(name):
    make, expected = CURVES[name]
    assert learning_rates(make, len(expected) - 1) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", CURVES)
def test_they_stay_after_the_last_step(name):
    make, expected = CURVES[name]
    found = learning_rates(make, len(expected) + 3)
    assert found[len(expected) :] == [found[len(expected) - 1]] * 4


def test_momentum_stays_too():
    seen = take(ours.OneCycleLR(optimizer([1.0]), 8), 12)
    assert seen[0][1] == 0.95
    assert min(momentum for _, momentum in seen) == pytest.approx(0.85, abs=0.01)
    assert {momentum for _, momentum in seen[7:]} == {0.95}


# torch's.

PAIRS = {
    "cosine": (lambda o: ours.CosineAnnealingLR(o, N, 0.01), lambda o: theirs.CosineAnnealingLR(o, N, 0.01)),
    "milestones": (lambda o: ours.MultiStepLR(o, N, [2, 2, 7]), lambda o: theirs.MultiStepLR(o, [2, 2, 7])),
    "polynomial": (lambda o: ours.PolynomialLR(o, N, 0.0, 0.9), lambda o: theirs.PolynomialLR(o, N, 0.9)),
    "function": (
        lambda o: ours.LambdaLR(o, N, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
        lambda o: theirs.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    ),
    "factors": (
        lambda o: ours.MultiplicativeLR(o, N, lambda step: 1 - 0.1 / step),
        lambda o: theirs.MultiplicativeLR(o, lambda step: 1 - 0.1 / step),
    ),
    "steps": (lambda o: ours.StepLR(o, N, 5, 0.3), lambda o: theirs.StepLR(o, 5, 0.3)),
    "exponential": (lambda o: ours.ExponentialLR(o, N, 0.7), lambda o: theirs.ExponentialLR(o, 0.7)),
}
ONE_CYCLES = [
    {},
    {"anneal_strategy": "linear", "pct_start": 0.5},
    {"cycle_momentum": False, "div_factor": 3.0, "final_div_factor": 7.0},
    {"base_momentum": 0.5, "max_momentum": 0.6, "pct_start": 0.0},
    {"pct_start": 1.0},
]


@pytest.mark.parametrize("cast", [float, torch.tensor])
@pytest.mark.parametrize("name", PAIRS)
def test_it_is_torchs_bit_for_bit(name, cast):
    scheduler, torch_scheduler = (make(optimizer([cast(0.1), cast(0.03)])) for make in PAIRS[name])
    assert isinstance(scheduler, type(torch_scheduler))
    assert take(scheduler, N) == take(torch_scheduler, N)
    assert scheduler.get_last_lr() == torch_scheduler.get_last_lr()
    assert isinstance(scheduler.optimizer.param_groups[0]["lr"], type(cast(0.1)))


@pytest.mark.parametrize("name", PAIRS)
def test_changes_from_outside_last_as_in_torch(name):
    seen = []
    for make in PAIRS[name]:
        scheduler = make(optimizer())
        take(scheduler, 3)
        scheduler.optimizer.param_groups[1]["lr"] /= 2
        seen.append(take(scheduler, 4))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, AdamW])
@pytest.mark.parametrize("settings", ONE_CYCLES)
def test_a_cycle_is_torchs_bit_for_bit(settings, kind):
    scheduler = ours.OneCycleLR(optimizer(kind=kind), N, **settings)
    torch_scheduler = theirs.OneCycleLR(optimizer(kind=kind), [0.1, 0.03], total_steps=N, **settings)
    assert isinstance(scheduler, theirs.OneCycleLR)
    assert take(scheduler, N - 1) == take(torch_scheduler, N - 1)


def test_a_cycle_may_follow_another_schedule():
    of = optimizer([0.5])
    take(ours.LinearWarmupLR(of, N, 5), 2)
    assert max(lr for lr, _ in take(ours.OneCycleLR(of, 20, 0.5), 20)) == 0.5
    assert max(lr for lr, _ in take(ours.OneCycleLR(of, 20, 0.5), 20)) == 0.5


def test_it_runs_in_torchs_sequence_and_chain():
    of, reference = optimizer(), optimizer()
    sequence = theirs.SequentialLR(of, [theirs.ConstantLR(of, 0.5, 3), ours.CosineAnnealingLR(of, 5)], [3])
    plain = theirs.SequentialLR(
        reference, [theirs.ConstantLR(reference, 0.5, 3), theirs.CosineAnnealingLR(reference, 5)], [3]
    )
    assert take(sequence, 8) == take(plain, 8)
    of, reference = optimizer(), optimizer()
    chain = theirs.ChainedScheduler([theirs.LinearLR(of, 0.5, 1.0, 3), ours.ExponentialLR(of, N, 0.9)])
    plain = theirs.ChainedScheduler([theirs.LinearLR(reference, 0.5, 1.0, 3), theirs.ExponentialLR(reference, 0.9)])
    assert take(chain, 8) == take(plain, 8)


# The curve and the recursion.


@pytest.mark.parametrize("name", CASES)
def test_jumps_go_to_the_same_places(name):
    walked = take(CASES[name](optimizer()), N + 2)
    scheduler = CASES[name](optimizer())
    for step in [*range(N + 3), 3, 0, N, 7]:
        jump(scheduler, step)
        assert hyperparameters(scheduler.optimizer) == pytest.approx(walked[step], rel=1e-12, abs=1e-16)


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_is_changed_in_place(name):
    lr = torch.tensor(0.1, dtype=torch.float64)
    of = optimizer([lr])
    (held,) = (group["lr"] for group in of.param_groups)
    seen = [lr for lr, _ in take(CASES[name](of), N + 1)]
    assert of.param_groups[0]["lr"] is held
    assert seen == pytest.approx(learning_rates(CASES[name], N + 1, 0.1), rel=1e-12, abs=1e-16)
    assert len(set(seen)) > 2  # what was seen before did not change along


def test_a_floor_may_be_the_learning_rate_itself():
    assert learning_rates(lambda o: ours.PolynomialLR(o, 4), 4, torch.tensor(1e-4)) == pytest.approx([1e-4] * 5)


def test_whole_numbers_of_numpy_are_steps():
    scheduler = ours.LinearWarmupLR(optimizer(), np.int64(8), warmup_steps=np.int32(2))
    assert type(scheduler.state_dict()["total_steps"]) is int
