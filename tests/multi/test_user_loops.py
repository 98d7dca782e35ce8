"""Loops as users write them, under every plugin: what one process gives, or an error that says what to write."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from harness import RanksFailed, preload, run_ranks
from oracles.joined_slices import joined_over_ranks
from oracles.run_distances import beyond, scalar_bound, tensor_bounds, tensor_distances
from parity import EXACT
from user_loops import LOOPS, STRATEGIES, OneProcess, as_markdown, on_the_host
from zoo import TRANSFORMERS_MODULES

preload(*TRANSFORMERS_MODULES, "user_loops", "schedulefree")


def run_loop(loop: str, strategy: str):
    outcome = LOOPS[loop].run(STRATEGIES[strategy]())
    values = {name: one.cpu() for name, one in outcome.values.items()}
    return outcome.losses, {name: joined_over_ranks(one) for name, one in outcome.models.items()}, values


@functools.cache
def in_one_process(loop: str):
    """Returns losses, weights, values, and the weights before training."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    booster = OneProcess()
    try:
        outcome = LOOPS[loop].run(booster)
    finally:
        torch.set_num_threads(num_threads)
    initial = {name: booster.initial[id(model)] for name, model in outcome.models.items()}
    weights = {name: on_the_host(one.state_dict()) for name, one in outcome.models.items()}
    return outcome.losses, weights, on_the_host(outcome.values), initial


def assert_equals_one_process(loop: str, strategy: str) -> None:
    losses, weights, values, initial = in_one_process(loop)
    of_ranks = run_ranks(run_loop, 2, loop, strategy)
    for step, expected in enumerate(losses):
        # Ranks have losses of their parts of the batch, or all have that of the whole.
        found = sum(one[0][step] for one in of_ranks) / len(of_ranks)
        assert abs(found - expected) <= scalar_bound(expected, EXACT.loss), f"loss {step}: {found}, not {expected}"
    for rank, (_, found_weights, found_values) in enumerate(of_ranks):
        for name, expected in weights.items():
            distances = tensor_distances(found_weights[name], expected)
            far = beyond(distances, tensor_bounds(expected, initial[name], EXACT.update))
            assert not far, f"{name} on rank {rank}: {'; '.join(far)}"
        torch.testing.assert_close(found_values, values, rtol=1e-5, atol=1e-5)


def assert_is_as_in_the_table(loop: str, strategy: str) -> None:
    if (package := LOOPS[loop].package) is not None:
        pytest.importorskip(package)
    pattern = LOOPS[loop].refused.get(strategy)
    if pattern is None:
        assert_equals_one_process(loop, strategy)
        return
    with pytest.raises(RanksFailed) as failed:
        run_ranks(run_loop, 2, loop, strategy)
    assert re.search(pattern, failed.value.first.summary, re.DOTALL), failed.value.first.summary


# Another one for each: the first loop under the first, the second under the second, ...
UNDER_ONE_PLUGIN = [
    (loop, loop.strategies[number * 5 % len(loop.strategies)])
    for number, loop in enumerate(one for one in LOOPS.values() if not one.has_sequences)
]


@pytest.mark.on_device
def test_every_loop_under_one_plugin():
    for loop, strategy in UNDER_ONE_PLUGIN:
        if loop.package is None:
            assert_is_as_in_the_table(loop.name, strategy)


@pytest.mark.on_device
def test_every_loop_of_a_package_under_one_plugin():
    for loop, strategy in UNDER_ONE_PLUGIN:
        if loop.package is not None:  # all of one package: where it is missing the test is skipped
            assert_is_as_in_the_table(loop.name, strategy)


def test_the_table_in_the_docs_is_this_one():
    page = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
    assert as_markdown() in page, "run `python -m user_loops` with tests and tests/cases on PYTHONPATH for the table"


CASES = [(loop, strategy) for loop in LOOPS for strategy in LOOPS[loop].strategies]


@pytest.mark.slow
@pytest.mark.on_device
@pytest.mark.parametrize(("loop", "strategy"), CASES)
def test_loop(loop, strategy):
    assert_is_as_in_the_table(loop, strategy)
