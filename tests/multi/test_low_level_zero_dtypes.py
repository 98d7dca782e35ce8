"""LowLevelZeroPlugin: dtypes of weights, inputs and buffers, and graphs that outlive their weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn
from zero_twins import Twins, mlp

from booster import Booster
from booster.plugins import LowLevelZeroPlugin

pytestmark = pytest.mark.on_device

STAGES = pytest.mark.parametrize("stage", [1, 2])


@STAGES
@pytest.mark.parametrize("master_weights", [True, False])
@distributed(world_size=[1, 2])
def test_only_masters_remember_small_updates(stage, master_weights):
    # An update of 2**-12 of a weight of 1 is a sixteenth of what bf16 can tell apart there.
    model = nn.Linear(40, 3)
    nn.init.ones_(model.weight)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="bf16", master_weights=master_weights))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=2.0**-12))
    for _ in range(32):
        booster.backward(model(torch.ones(1, 40, device=booster.device)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    formats = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    assert formats == {torch.float32 if master_weights else torch.bfloat16}
    expected = 1 - 32 * 2.0**-12 if master_weights else 1.0
    assert torch.equal(model.state_dict()["weight"].float().cpu(), torch.full((3, 40), expected))


class Recording(nn.Module):
    """Keeps the formats of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, ids: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, ids.dtype, mask.dtype]
        return self.layer(x.to(self.layer.weight.dtype) * mask)


@pytest.mark.parametrize("cast_inputs", [True, False])
@distributed(world_size=2)
def test_floating_inputs_are_cast_where_asked(cast_inputs):
    raw = Recording()
    booster = Booster(plugin=LowLevelZeroPlugin(precision="bf16", cast_inputs=cast_inputs))
    model, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    with booster.device:
        inputs, mask = (torch.ones(2, 3), torch.ones(2, dtype=torch.long)), torch.ones(3, dtype=torch.bool)
    output = model(*inputs, mask=mask)
    assert raw.seen == [torch.bfloat16 if cast_inputs else torch.float32, torch.long, torch.bool]
    assert output.dtype == torch.float32


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@distributed(world_size=2)
def test_ranks_have_the_first_ones_buffers_where_asked(broadcast_buffers):
    raw = nn.BatchNorm1d(3)
    plugin = LowLevelZeroPlugin(precision="fp32", sync_batch_norm=False, broadcast_buffers=broadcast_buffers)
    booster = Booster(plugin=plugin)
    model, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    model(torch.full((4, 3), 1.0 + dist.get_rank(), device=booster.device))  # leaves 0.1 of each rank's own mean
    model(torch.zeros(4, 3, device=booster.device))
    first = 0.09 if broadcast_buffers else 0.09 * (1 + dist.get_rank())
    torch.testing.assert_close(raw.running_mean.cpu(), torch.full((3,), first))


@STAGES
@pytest.mark.parametrize("extra_dp_size", [1, 2, 4])
@distributed(world_size=4)
def test_overflow_on_one_rank_reaches_its_replicas(stage, extra_dp_size):
    plugin = LowLevelZeroPlugin(stage, "fp16", initial_scale=2**4, hysteresis=1, extra_dp_size=extra_dp_size)
    booster, raw = Booster(plugin=plugin), mlp()
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for culprit in range(4):
        x = torch.ones(2, 7, device=booster.device) * (float("inf") if dist.get_rank() == culprit else 1.0)
        booster.backward(model(x).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped
    assert optimizer.loss_scaler.scale == 1.0
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@STAGES
@pytest.mark.parametrize("overlap_allgather", [True, False])
@distributed(world_size=2)
def test_a_graph_from_before_the_step_is_an_error_as_in_torch(stage, overlap_allgather):
    twins = Twins(stage=stage, overlap_allgather=overlap_allgather).boost()
    whole, part = twins.batch(0)
    stale, ours = twins.loss(twins.plain, whole), twins.loss(twins.model, part)
    twins.train([1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twins.booster.backward(ours, twins.optimizer)
