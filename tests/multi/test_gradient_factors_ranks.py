"""Shards whose gradients are multiplied within the step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from oracles.fused_sgd import FusedSGD
from torch import nn

from booster import Booster
from booster.plugins import LowLevelZeroPlugin

pytestmark = pytest.mark.on_device


@distributed(world_size=[1, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_shards_equal_an_unfused_step(stage, precision):
    results = []
    for cls in (torch.optim.SGD, FusedSGD):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        booster = Booster(
            plugin=LowLevelZeroPlugin(stage=stage, precision=precision, max_norm=0.05, initial_scale=2**8)
        )
        model, optimizer, *_ = booster.boost(module, cls(module.parameters(), lr=0.1))
        for step in range(3):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
            booster.backward(model(x.to(booster.device)).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        results.append(([one.float() for one in model.unwrap().state_dict().values()], optimizer.get_grad_norm()))
    assert optimizer.optim.num_fused == 3
    bound = {"fp32": 1e-6, "bf16": 2.0**-7, "fp16": 2.0**-10}[precision]
    for ours, theirs in zip(results[0][0], results[1][0], strict=True):
        assert torch.allclose(ours, theirs, rtol=bound, atol=1e-7)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6 if precision == "fp32" else 1e-2)
