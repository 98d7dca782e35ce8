"""Axes of one's own: their groups, and what a plugin with them computes and saves."""

from __future__ import annotations

import pytest
import torch
from harness import distributed
from oracles.joined_slices import joined_over_ranks
from torch import nn

import booster
from booster import Booster
from booster.comm import all_gather_equal, all_reduce_sum, group_rank
from booster.device import current_device
from booster.errors import CheckpointError, ConfigError
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.trainer.gradient_handlers import attach_gradient_handlers

pytestmark = pytest.mark.on_device


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step, part=0, num_parts=1):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(current_device()).chunk(num_parts)[part]


def loss_of(model, inputs):
    return (model(inputs) - inputs[:, :2]).square().mean()


class Run:
    def __init__(self, model=None, **arguments):
        self.plugin = HybridParallelPlugin(precision="fp32", **arguments)
        self.booster = Booster(plugin=self.plugin)
        model = make_model() if model is None else model
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.05))

    def backward(self, inputs):
        self.booster.backward(loss_of(self.model, inputs), self.optimizer)

    def step(self, inputs):
        self.backward(inputs)
        self.optimizer.step()
        self.optimizer.zero_grad()


def serial_weights(num_steps, model=None):
    model = (make_model() if model is None else model).to(current_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(num_steps):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.cpu() for name, one in model.state_dict().items()}


def assert_serial(run, num_steps):
    torch.testing.assert_close(joined_over_ranks(run.model), serial_weights(num_steps), rtol=1e-5, atol=1e-6)


def axes_of(mesh):
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


@distributed(world_size=2)
def test_the_mesh_of_every_plugin_has_named_axes():
    assert axes_of(TorchDDPPlugin().mesh) == {"dp": 2}
    for plugin in (LowLevelZeroPlugin(), GeminiPlugin(), TorchFSDPPlugin()):
        assert axes_of(plugin.mesh) == {"replica": 1, "shard": 2}
    assert axes_of(HybridParallelPlugin(tp_size=2).mesh) == {"dp": 1, "pp": 1, "sp": 1, "tp": 2}
    assert axes_of(HybridParallelPlugin(ep_size=2).mesh) == {"edp": 1, "ep": 2, "pp": 1, "sp": 1, "tp": 1}
    own = HybridParallelPlugin(extra_axes={"replica": 2, "other": 1})
    assert axes_of(own.mesh) == {"replica": 2, "other": 1, "dp": 1, "pp": 1, "sp": 1, "tp": 1}
    assert own.axis_sizes() == {"dp": 1, "pp": 1, "sp": 1, "tp": 1, "replica": 2, "other": 1}
    assert own.mesh.get_local_rank("replica") == group_rank()
    total = all_reduce_sum(
        torch.full((1,), float(group_rank() + 1), device=current_device()), own.mesh.get_group("replica")
    )
    assert float(total) == 3


@distributed(world_size=2)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_ranks_along_the_axis_train_the_same(zero_stage):
    torch.manual_seed(3 + group_rank())  # weights become those of the first rank
    model = make_model() if group_rank() == 0 else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    run = Run(model, extra_axes={"replica": 2}, zero_stage=zero_stage)
    assert (run.plugin.dp_size, run.plugin.dp_rank) == (1, 0)
    for step in range(3):
        run.step(batch(step))
    assert_serial(run, 3)


@distributed(world_size=4)
@pytest.mark.parametrize(
    "arguments", [{}, {"zero_stage": 1}, {"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}], ids=str
)
def test_beside_the_plugins_axes(arguments):
    run = Run(extra_axes={"replica": 2}, **arguments)
    assert run.plugin.mesh.get_local_rank("replica") == group_rank() // 2
    for step in range(3):
        if run.plugin.pp_size > 1:
            run.booster.execute_pipeline(
                iter([batch(step)]), run.model, lambda y, x: (y - x[:, :2]).square().mean(), run.optimizer
            )
            run.optimizer.step()
            run.optimizer.zero_grad()
        else:
            run.step(batch(step, run.plugin.dp_rank, run.plugin.dp_size))
    assert_serial(run, 3)


@distributed(world_size=2)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_gradient_hook_makes_the_axis_a_data_parallel_one(zero_stage):
    run = Run(extra_axes={"replica": 2}, zero_stage=zero_stage)
    group = run.plugin.mesh.get_group("replica")

    def average(gradients):
        for gradient in gradients:
            all_reduce_sum(gradient, group).div_(2)

    run.optimizer.register_gradient_hook(average)
    for step in range(3):
        run.step(batch(step, run.plugin.mesh.get_local_rank("replica"), 2))
    assert_serial(run, 3)


class ReplicaHandler(booster.GradientHandler):
    """Averages over an axis of one's own."""

    reduces = "replica"

    def handle_gradient(self):
        for _, gradient in self.named_gradients():
            all_reduce_sum(gradient, self.group("replica")).div_(2)


@distributed(world_size=2)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_gradient_handler_reduces_over_the_axis(zero_stage):
    run = Run(extra_axes={"replica": 2}, zero_stage=zero_stage)
    attach_gradient_handlers(run.booster, run.model, run.optimizer, [ReplicaHandler])
    for step in range(3):
        run.step(batch(step, run.plugin.mesh.get_local_rank("replica"), 2))
    assert_serial(run, 3)


@distributed(world_size=2)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_checkpoints_open_with_other_axes(tmp_path, zero_stage):
    run = Run(extra_axes={"replica": 2}, zero_stage=zero_stage)
    for step in range(2):
        run.step(batch(step))
    run.booster.save(tmp_path / "c", run.model, run.optimizer)
    for arguments in ({"extra_axes": {"replica": 2}, "zero_stage": zero_stage}, {"tp_size": 2}):
        other = Run(**arguments)
        other.booster.load(tmp_path / "c", other.model, other.optimizer)
        other.step(batch(2))
        assert_serial(other, 3)
    with run.booster.accumulate(run.model, run.optimizer, 2):
        run.backward(batch(2))
    with pytest.raises(CheckpointError, match="in the middle of an accumulation gradients may differ"):
        run.booster.save(tmp_path / "d", run.model, run.optimizer)


@distributed(world_size=2)
def test_weights_that_differ_along_the_axis_are_not_saved(tmp_path):
    run = Run(extra_axes={"replica": 2})
    run.booster.save_model(run.model, tmp_path / "equal")
    run.step(batch(group_rank()))
    with pytest.raises(CheckpointError, match="differ along an axis of extra_axes"):
        run.booster.save_model(run.model, tmp_path / "c")


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (2, "must be a dict"),
        ({"replica": 0}, "not an axis"),
        ({"my axis": 2}, "not an axis"),
        ({3: 2}, "not an axis"),
        ({"tp": 2}, "tp_size"),
        ({"replica": 3}, "do not divide world_size=2"),
    ],
    ids=str,
)
def test_what_is_no_axis_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        HybridParallelPlugin(extra_axes=given)


# The documents' parallel mode of one's own, here: ranks of the axis "new_mode" compute different features of a layer.


class _Replicated(torch.autograd.Function):
    """Identity, whose gradient is the sum over the group: each rank uses a part of the value."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce_sum(gradient.contiguous().clone(), ctx.group), None


class _Joined(torch.autograd.Function):
    """Features of all ranks, joined; the gradient of a rank's own ones."""

    @staticmethod
    def forward(ctx, features, group, rank, size):
        ctx.rank, ctx.size = rank, size
        return torch.cat(all_gather_equal(features, group).chunk(size), -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.size, -1)[ctx.rank].contiguous(), None, None, None


class NewModeLinear(nn.Linear):
    """Linear layer of which each rank of an axis computes a part of the output features."""

    def __init__(self, in_features, out_features, mesh, axis):
        super().__init__(in_features, out_features)
        self.group, self.rank, self.size = mesh.get_group(axis), mesh.get_local_rank(axis), mesh[axis].size()

    def forward(self, inputs):
        inputs = _Replicated.apply(inputs, self.group)
        weight, bias = (_Replicated.apply(one, self.group).chunk(self.size)[self.rank] for one in self.parameters())
        return _Joined.apply(nn.functional.linear(inputs, weight, bias), self.group, self.rank, self.size)


@distributed(world_size=2)
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_parallel_mode_of_ones_own(zero_stage):
    plugin = HybridParallelPlugin(precision="fp32", extra_axes={"new_mode": 2}, zero_stage=zero_stage)
    booster = Booster(plugin=plugin)
    plain = make_model()
    model = nn.Sequential(
        NewModeLinear(6, 8, plugin.mesh, "new_mode"), nn.Tanh(), NewModeLinear(8, 2, plugin.mesh, "new_mode")
    )
    model.load_state_dict(plain.state_dict())
    seen = []
    model[0].register_forward_hook(lambda layer, _, output: seen.append((layer.weight.chunk(2)[0].shape, output.shape)))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    for step in range(4):
        booster.backward(loss_of(model, batch(step)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] == ((4, 6), (8, 8))
    torch.testing.assert_close(joined_over_ranks(model), serial_weights(4, plain), rtol=1e-5, atol=1e-6)
