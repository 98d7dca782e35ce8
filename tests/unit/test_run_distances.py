"""The bounds of Note [Bounds]: what nudged runs widen, what nothing widens, and the faults that are still found."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from dataclasses import replace

import parity
import pytest
import torch
from oracles import serial_training
from oracles.run_distances import NUM_NUDGES, Tolerance, assert_near_one, assert_within_spread
from oracles.serial_training import Record
from parity import Case, train_reference
from zoo import needs_transformers

FIXED = Tolerance(loss=1e-3, norm=1e-3, update=1e-3)
CAP = Tolerance(loss=1e-2, norm=1e-2, update=1e-2)
INITIAL = {"weight": torch.zeros(4, dtype=torch.float64), "steps": torch.tensor(0)}


def run(loss=1.0, norm=1.0, weight=1.0, steps=5, first_norm=1.0):
    weights = {"weight": torch.full((4,), weight, dtype=torch.float64), "steps": torch.tensor(steps)}
    return Record(losses=[1.0, loss], norms=[first_norm, norm], weights=weights)


def spread_of(**nudged):
    """Trains to the same run without a nudge, and to that with the last nudge; counts the runs."""

    def train(seed):
        train.num_runs += 1
        return run(**nudged) if seed == NUM_NUDGES - 1 else run()

    train.num_runs = 0
    return train


def test_within_the_fixed_bounds_nothing_is_measured():
    train = spread_of(loss=1.5)
    assert_within_spread(run(loss=1.0009, norm=0.9991, weight=1.0009), train, INITIAL, FIXED, CAP, "a run")
    assert train.num_runs == 1


@pytest.mark.parametrize("quantity", ["loss", "norm", "weight"])
def test_what_nudged_runs_differ_in_may_differ_twice_as_much(quantity):
    train = spread_of(**{quantity: 1.002})
    assert_within_spread(run(**{quantity: 1.0039}), train, INITIAL, FIXED, CAP, "a run")
    assert train.num_runs == 1 + NUM_NUDGES
    with pytest.raises(AssertionError, match=r"measured over 6 nudged runs: .*away, allowed 0\.00[48]"):
        assert_within_spread(run(**{quantity: 1.0042}), train, INITIAL, FIXED, CAP, "a run")


def test_what_one_step_measures_widens_those_after_it():
    train = spread_of(first_norm=1.002)
    assert_within_spread(run(norm=1.0039), train, INITIAL, FIXED, CAP, "a run")
    with pytest.raises(AssertionError, match=r"gradient norm of step 1: 0\.0042 away"):
        assert_within_spread(run(norm=1.0042), train, INITIAL, FIXED, CAP, "a run")


def test_what_one_quantity_measures_widens_no_other_and_no_step_before():
    with pytest.raises(AssertionError, match=r"gradient norm of step 0: 0\.002 away"):
        assert_within_spread(run(first_norm=1.002), spread_of(norm=1.004, weight=1.004), INITIAL, FIXED, CAP, "a run")


@pytest.mark.parametrize("quantity", ["loss", "norm", "weight"])
def test_nothing_widens_the_cap(quantity):
    train = spread_of(**{quantity: 2.0})
    assert_within_spread(run(**{quantity: 1.0099}), train, INITIAL, FIXED, CAP, "a run")
    with pytest.raises(AssertionError, match=r"away, allowed 0\.0[12]"):
        assert_within_spread(run(**{quantity: 1.0102}), train, INITIAL, FIXED, CAP, "a run")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond_every_bound(value):
    with pytest.raises(AssertionError, match="gradient norm of step 1"):
        assert_within_spread(run(norm=value), spread_of(norm=1.004), INITIAL, FIXED, CAP, "a run")
    with pytest.raises(AssertionError, match="a step overflowed"):
        assert_within_spread(run(norm=1.1), spread_of(norm=value), INITIAL, FIXED, CAP, "a run")


def test_integers_dtypes_and_names_must_be_equal():
    other = run()
    other.weights["weight"] = other.weights["weight"].float()
    more = run()
    more.weights["more"] = torch.zeros(1)
    for found in (run(steps=4), other, more):
        with pytest.raises(AssertionError):
            assert_within_spread(found, spread_of(), INITIAL, FIXED, CAP, "a run")


def test_a_run_may_be_near_a_nudged_run_instead_of_the_serial_one_but_not_between_them():
    train = spread_of(weight=2.0)
    assert_near_one(run(weight=2.001), train, INITIAL, FIXED, "a run")
    with pytest.raises(AssertionError, match="not near any of 6 nudged runs either: weight: 1 away"):
        assert_near_one(run(weight=1.5), train, INITIAL, FIXED, "a run")


# Cases whose models amplify roundings: most bounds of the first and the last are measured ones.
CASES = {
    "opt": Case("torch_fsdp", "opt", 4, "fp16", max_norm=0.5, optimizer="sgd", accumulation=2),
    "t5": Case("torch_fsdp", "t5", 4, "fp16_naive", max_norm=0.5, optimizer="sgd", accumulation=2),
    "t5 of AdamW": Case("gemini", "t5", 3, "fp16", accumulation=2),
}
# By how much a fault multiplies the gradient of a rank's first microbatch, and of all others.
GRADIENT_FAULTS = {"a microbatch by 5 %": (1.05, 1.0), "a microbatch twice": (2.0, 1.0), "the loss scale": (1.01, 1.01)}


def measured(name, nudge=None):
    return train_reference(CASES[name], True, nudge)


def assert_allowed(name, found):
    case = CASES[name]
    _, fixed, cap = parity._comparison(case)
    initial = case.entry.build().state_dict()
    assert_within_spread(found, functools.partial(measured, name), initial, fixed, cap, name)


@contextmanager
def uncached_runs(monkeypatch):
    """Runs with a planted fault must neither be taken from the cache nor be left in it."""
    with monkeypatch.context() as patch:
        patch.setattr(parity, "_serial_run", parity._serial_run.__wrapped__)
        yield patch


def train_with_wrong_gradients(monkeypatch, case, factors, at_step):
    entry, num_calls = case.entry, 0
    calls_per_step = case.num_data_parts * case.accumulation

    def loss(model, batch):
        nonlocal num_calls
        step, index = divmod(num_calls, calls_per_step)
        num_calls += 1
        value = entry.loss(model, batch)
        factor = factors[min(index, 1)] if at_step in (None, step) else 1.0
        return value.detach() + (value - value.detach()) * factor

    with uncached_runs(monkeypatch) as patch:
        patch.setattr(parity, "get_model", lambda *_: replace(entry, loss=loss))
        return train_reference(case, True)


def train_without_an_update(monkeypatch, case, index, at_step):
    make = serial_training.make_optimizer

    def make_faulty(name, groups):
        optimizer, step = make(name, groups), 0

        def skip(*_):
            nonlocal step
            if step == at_step:
                [p for group in optimizer.param_groups for p in group["params"]][index].grad = None
            step += 1

        optimizer.register_step_pre_hook(skip)
        return optimizer

    with uncached_runs(monkeypatch) as patch:
        patch.setattr(serial_training, "make_optimizer", make_faulty)
        return train_reference(case, True)


def cases(*fast):
    """All cases; those that take seconds in `make test-all` only."""
    return [
        pytest.param(name, marks=[needs_transformers, *([] if name in fast else [pytest.mark.slow])]) for name in CASES
    ]


# Of the third, AdamW's T5, some nudged runs are beyond the cap.
@pytest.mark.parametrize("name", cases("opt")[:2])
def test_what_only_rounds_in_another_way_is_no_fault(name):
    assert_allowed(name, measured(name, nudge=NUM_NUDGES))


@pytest.mark.parametrize("at_step", [None, 0])
@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
@pytest.mark.parametrize("name", cases("opt"))
def test_wrong_gradients_are_found(monkeypatch, name, fault, at_step):
    found = train_with_wrong_gradients(monkeypatch, CASES[name], GRADIENT_FAULTS[fault], at_step)
    with pytest.raises(AssertionError, match="bounds measured over 6 nudged runs"):
        assert_allowed(name, found)


@pytest.mark.parametrize("at_step", [2, 4])
@pytest.mark.parametrize("name", cases("opt"))
def test_a_microbatch_that_counts_twice_is_found_in_late_steps_too(monkeypatch, name, at_step):
    found = train_with_wrong_gradients(monkeypatch, CASES[name], GRADIENT_FAULTS["a microbatch twice"], at_step)
    with pytest.raises(AssertionError, match="bounds measured over 6 nudged runs"):
        assert_allowed(name, found)


@pytest.mark.parametrize("at_step", [0, 4])
@pytest.mark.parametrize("index", [1, 8])
@pytest.mark.parametrize("name", cases("opt"))
def test_an_update_that_one_parameter_misses_is_found(monkeypatch, name, index, at_step):
    found = train_without_an_update(monkeypatch, CASES[name], index, at_step)
    with pytest.raises(AssertionError, match="bounds measured over 6 nudged runs"):
        assert_allowed(name, found)
