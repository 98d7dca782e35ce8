"""Loops as users write them, under every plugin: what one process gives, or an error that says what to write."""

from __future__ import annotations

import functools

import pytest
import torch
from harness import preload, run_ranks
from oracles.joined_slices import joined_over_ranks
from oracles.run_distances import beyond, scalar_bound, tensor_bounds, tensor_distances
from parity import EXACT
from user_loops import LOOPS, STRATEGIES, OneProcess
from zoo import TRANSFORMERS_MODULES

preload(*TRANSFORMERS_MODULES, "user_loops", "schedulefree")


def run_loop(loop: str, strategy: str):
    booster = STRATEGIES[strategy]()
    outcome = LOOPS[loop](booster)
    return outcome.losses, {name: joined_over_ranks(one) for name, one in outcome.models.items()}, outcome.values


@functools.cache
def in_one_process(loop: str):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    booster = OneProcess()
    try:
        outcome = LOOPS[loop](booster)
    finally:
        torch.set_num_threads(num_threads)
    initial = {name: booster.initial[id(model)] for name, model in outcome.models.items()}
    return outcome.losses, {name: dict(one.state_dict()) for name, one in outcome.models.items()}, outcome.values, initial


def assert_equals_one_process(loop: str, strategy: str) -> None:
    losses, weights, values, initial = in_one_process(loop)
    of_ranks = run_ranks(run_loop, 2, loop, strategy)
    for step, expected in enumerate(losses):
        found = sum(one[0][step] for one in of_ranks) / len(of_ranks)
        assert abs(found - expected) <= scalar_bound(expected, EXACT.loss), f"loss {step}: {found} instead of {expected}"
    for rank, (_, found_weights, found_values) in enumerate(of_ranks):
        for name, expected in weights.items():
            found = found_weights[name]
            far = beyond(tensor_distances(found, expected), tensor_bounds(expected, initial[name], EXACT.update))
            assert not far, f"{name} on rank {rank}: {'; '.join(far)}"
        torch.testing.assert_close(found_values, values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", LOOPS)
def test_loop(loop, strategy):
    assert_equals_one_process(loop, strategy)
