"""Loss scalers: torch's rule without hysteresis, a documented one with it, and exact saved states."""

from __future__ import annotations

import math
import random

import pytest
import torch

from booster.errors import CheckpointError, ConfigError
from booster.mixed_precision.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaleConfig


def torch_scales(overflows, **settings):
    scaler = torch.amp.GradScaler("cpu", **settings)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = []
    for overflow in overflows:
        scaler.scale(parameter.sum())  # its scale tensor is made at the first use
        parameter.grad = torch.full((1,), math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3},
        {"init_scale": 1000.1, "growth_factor": 1.3, "backoff_factor": 0.7, "growth_interval": 2},
        {"init_scale": 2.0**126, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1},
    ],
)
def test_equals_torch_grad_scaler(settings):
    draw = random.Random(0)
    overflows = [draw.random() < 0.2 for _ in range(100)]
    scaler = DynamicLossScaler(LossScaleConfig(*settings.values()))
    scales = []
    for overflow in overflows:
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == torch_scales(overflows, **settings)
    assert len(set(scales)) > 1


def scales_after(scaler, events):
    """Feeds "x" for an overflow and "." for a clean step."""
    scales = []
    for event in events:
        scaler.update(event == "x")
        scales.append(scaler.scale)
    return scales


def test_hysteresis_forgives_the_first_overflows():
    scaler = DynamicLossScaler(LossScaleConfig(64, 2, 0.5, 4, hysteresis=3))
    assert scales_after(scaler, "xxxx") == [64, 64, 32, 16]


def test_hysteresis_is_not_renewed_by_a_few_clean_steps():
    scaler = DynamicLossScaler(LossScaleConfig(64, 2, 0.5, 4, hysteresis=2))
    assert scales_after(scaler, "x...x.x") == [64, 64, 64, 64, 32, 32, 16]


def test_hysteresis_is_renewed_by_a_clean_growth_interval():
    scaler = DynamicLossScaler(LossScaleConfig(64, 2, 0.5, 2, hysteresis=2))
    assert scales_after(scaler, "xx..xx") == [64, 32, 32, 64, 64, 32]


@pytest.mark.parametrize(
    ("events", "settings", "expected"),
    [
        ("x", {"hysteresis": 3}, "the loss scale stays at 64: {}; 2 more overflows lower it (hysteresis=3)"),
        ("xx", {"hysteresis": 3}, "the loss scale stays at 64: {}; 1 more overflow lowers it (hysteresis=3)"),
        ("xxx", {"hysteresis": 3}, "loss scale 64 -> 32: {}"),
        ("xx", {"min_scale": 32}, "the loss scale stays at 32: {}; it is the smallest allowed (min_scale)"),
        ("x", {"min_scale": 64, "hysteresis": 2}, "stays at 64: {}; it is the smallest allowed (min_scale)"),
        ("x", {"backoff_factor": 1 - 2**-40}, "stays at 64: {}; backoff_factor=0.99"),
        ("..", {}, "loss scale 64 -> 128: no gradient overflowed"),
    ],
)
def test_an_overflow_that_changes_nothing_is_reported_with_why(events, settings, expected):
    """A report of "64 -> 64" looks as if the scaler had failed."""
    told = []
    numbers = {"growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 2, **settings}
    scales_after(DynamicLossScaler(LossScaleConfig(64, **numbers), told.append), events)
    assert expected.format("a gradient overflowed and the step was skipped") in told[-1]


def test_limits():
    scaler = DynamicLossScaler(LossScaleConfig(8, 4, 0.25, 1, min_scale=4, max_scale=16))
    assert scales_after(scaler, "..xx") == [16, 16, 4, 4]


def test_never_zero_and_never_infinite():
    falling = DynamicLossScaler(LossScaleConfig(1, 2, 2.0**-60, 1))
    scales_after(falling, "xxxx")
    assert falling.scale == 2.0**-126
    assert math.isfinite(1 / falling.scale)
    rising = DynamicLossScaler(LossScaleConfig(2.0**100, 2.0**20, 0.5, 1))
    assert scales_after(rising, "..") == [2.0**120, 2.0**120]


def test_state_goes_on_exactly():
    events = "..x.x...xx......x.xxx....."
    for cut in range(len(events)):
        whole = DynamicLossScaler(LossScaleConfig(1000.1, 1.3, 0.7, 3, hysteresis=2))
        expected = scales_after(whole, events)
        first = DynamicLossScaler(LossScaleConfig(1000.1, 1.3, 0.7, 3, hysteresis=2))
        scales_after(first, events[:cut])
        second = DynamicLossScaler(LossScaleConfig(5, 1.3, 0.7, 3, hysteresis=2))
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        assert scales_after(second, events[cut:]) == expected[cut:]
        assert second.state_dict() == whole.state_dict()


def test_loaded_scale_stays_within_the_limits():
    wide = DynamicLossScaler(LossScaleConfig(2.0**30, 2, 0.5, 1))
    narrow = DynamicLossScaler(LossScaleConfig(16, 2, 0.5, 1, max_scale=64))
    narrow.load_state_dict(wide.state_dict())
    assert narrow.scale == 64


def test_constant_scale():
    scaler = ConstantLossScaler(128)
    assert scales_after(scaler, "x.xx") == [128.0] * 4
    assert scaler.state_dict() == {"scale": 128.0}
    other = ConstantLossScaler(64)
    other.load_state_dict(scaler.state_dict())
    assert other.scale == 64.0


def test_dynamic_and_constant_states_load_into_each_other():
    dynamic, constant = DynamicLossScaler(LossScaleConfig(256, 2, 0.5, 1)), ConstantLossScaler(8)
    dynamic.load_state_dict(constant.state_dict())
    assert dynamic.scale == 256
    constant.load_state_dict(dynamic.state_dict())
    assert constant.scale == 8


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": math.nan},
        {"scale": 0.0},
        {"scale": "8"},
        {"scale": 8.0, "num_clean_steps": -1, "num_overflows": 0},
        {"scale": 8.0, "num_clean_steps": 1},
    ],
)
def test_foreign_states_are_refused(state):
    for scaler in (DynamicLossScaler(LossScaleConfig(4, 2, 0.5, 1)), ConstantLossScaler(4)):
        with pytest.raises(CheckpointError, match="not a loss scaler's state"):
            scaler.load_state_dict(state)
        assert scaler.scale == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"initial_scale": 0}, "initial_scale=0"),
        ({"initial_scale": -2.0}, "initial_scale"),
        ({"initial_scale": math.inf}, "initial_scale"),
        ({"initial_scale": "2"}, "initial_scale='2'"),
        ({"initial_scale": True}, "initial_scale"),
        ({"initial_scale": 2.0**128}, "initial_scale"),
        ({"growth_factor": 1.0}, "growth_factor=1.0"),
        ({"growth_factor": math.nan}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"backoff_factor": 0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"growth_interval": 2.5}, "growth_interval"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"min_scale": 0}, "min_scale"),
        ({"min_scale": 16}, "not between"),
        ({"max_scale": 4}, "not between"),
    ],
)
def test_bad_numbers_are_refused(arguments, named):
    good = {"initial_scale": 8, "growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 1}
    with pytest.raises(ConfigError, match=named):
        DynamicLossScaler(LossScaleConfig(**good | arguments))


def test_reports_skips_and_changes_only():
    lines = []
    scaler = DynamicLossScaler(LossScaleConfig(8, 2, 0.5, 2, hysteresis=2), lines.append)
    scales_after(scaler, "x.x..")
    assert len(lines) == 3
    assert "stays at 8" in lines[0]
    assert "8 -> 4" in lines[1]
    assert "4 -> 8" in lines[2]
