"""A step in several calls: counters, and what a failure leaves for the next attempt."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster.plugins.sharding.optimizer import norm_over_ranks
from booster.plugins.sharding.step_in_parts import step_in_parts


class Counting(torch.optim.SGD):
    """Counts its steps in each group from the first one on, as optimizers of apex do, and in an attribute."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.seen = []

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
        self.num_steps = getattr(self, "num_steps", 0) + 1
        self.seen.append((self.param_groups[0]["step"], self.num_steps))
        return super().step(closure)


def optimizer_with_gradients():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    return parameters, Counting(parameters)


def test_counters_that_the_first_step_creates_count_once():
    parameters, optimizer = optimizer_with_gradients()
    for _ in range(2):
        step_in_parts(optimizer, [[one] for one in parameters], lambda number: optimizer.step())
    assert optimizer.seen == [(1, 1)] * 3 + [(2, 2)] * 3
    assert all(one.item() == pytest.approx(-0.2) for one in parameters)


def test_another_attempt_continues_after_a_failure():
    parameters, optimizer = optimizer_with_gradients()
    fails = True

    def step(number):
        if fails and number == 1:
            raise OSError("disk full")
        optimizer.step()

    with pytest.raises(OSError, match="disk full"):
        step_in_parts(optimizer, [[one] for one in parameters], step)
    assert [one.grad is not None for one in parameters] == [False, True, True]
    fails = False
    step_in_parts(optimizer, [[one] for one in parameters], step)
    assert all(one.item() == pytest.approx(-0.1) for one in parameters)
    assert set(optimizer.seen) == {(1, 1)}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_are_computed_in_fp32_at_least(dtype, norm_type):
    gradients = [torch.full((300, 300), 2.0, dtype=dtype), torch.full((7,), -3.0, dtype=torch.float32)]
    norm = norm_over_ranks(gradients, norm_type, None)
    joined = torch.cat([one.double().view(-1) for one in gradients])
    torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(joined, norm_type), rtol=1e-6, atol=0)
