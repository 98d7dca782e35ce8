"""TorchFSDPPlugin: norms and clipping equal one process."""

from __future__ import annotations

import pytest
import torch
from fsdp_loop_cases import ONE_LEVEL, Odd, sgd, slow
from fsdp_twins import STRATEGIES, FSDPTwins
from harness import distributed
from torch import nn

pytestmark = pytest.mark.on_device


def _plain_gradients(twins):
    return [one.grad for one in twins.plain.parameters() if one.grad is not None]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@ONE_LEVEL
@distributed(world_size=[slow(2), 3])
def test_norms_of_any_order_equal_one_process(strategy, norm_type):
    twins = FSDPTwins(Odd, optimizer=sgd, **STRATEGIES[strategy])
    for step in range(2):
        twins.backward(step)
        found = twins.booster.clip_grad_norm_(twins.optimizer, 0.01, norm_type)
        expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01, norm_type)
        assert expected > 0.01  # it does clip
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        for optimizer in (twins.plain_optimizer, twins.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal()


@distributed(world_size=4)
def test_norms_over_replicas_count_every_gradient_once():
    twins = FSDPTwins(Odd, **STRATEGIES["hybrid"])
    twins.train().assert_equal()  # `step` compares the norms
    twins.backward(9)
    found = twins.booster.clip_grad_norm_(twins.optimizer, float("inf"), float("inf"))
    torch.testing.assert_close(found, nn.utils.get_total_norm(_plain_gradients(twins), float("inf")))


@ONE_LEVEL
@distributed(world_size=[1, 3])
def test_clipping_by_value_equals_one_process(strategy):
    twins = FSDPTwins(Odd, **STRATEGIES[strategy])
    for step in range(3):
        twins.backward(step)
        assert max(gradient.abs().max() for gradient in _plain_gradients(twins)) > 0.02
        nn.utils.clip_grad_value_(twins.plain.parameters(), 0.02)
        twins.optimizer.clip_grad_by_value(0.02)
        twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@distributed(world_size=2)
def test_max_norm_of_the_plugin_is_clipping_by_hand(norm_type):
    twins = FSDPTwins(Odd, max_norm=0.05, norm_type=norm_type)
    for step in range(3):
        twins.backward(step)
        expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.05, norm_type)
        for optimizer in (twins.plain_optimizer, twins.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        assert twins.optimizer.get_grad_norm() == pytest.approx(float(expected), rel=1e-4)
    twins.assert_equal()


@distributed(world_size=2)
def test_get_grad_norm_without_clipping_and_after_the_step():
    twins = FSDPTwins(Odd)
    assert twins.optimizer.get_grad_norm() is None
    twins.backward(0)
    expected = float(nn.utils.get_total_norm(_plain_gradients(twins)))
    assert twins.optimizer.get_grad_norm() == pytest.approx(expected, rel=1e-5)
    twins.step()
    assert twins.optimizer.get_grad_norm() == pytest.approx(expected, rel=1e-5)
    twins.assert_equal()
