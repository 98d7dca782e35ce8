"""Normalization over the batches of all ranks: what one process computes, by the user's own modules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn

from booster import Booster
from booster.device import current_device
from booster.plugins.sync_batch_norm import convert_batch_norm

PLUGINS = pytest.mark.parametrize("plugin", ["torch_ddp", "low_level_zero", "gemini", "torch_fsdp", "hybrid_parallel"])


@pytest.mark.on_device
@distributed(world_size=[2, 3])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (2, 3, 4, 4)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_equals_one_process(shape, momentum):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    device = current_device()
    whole = torch.randn(size * shape[0], *shape[1:]).to(device) * 3 + 100  # a large mean: squares would cancel
    reference = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d][len(shape) - 2](3, momentum=momentum).to(device)
    ours = type(reference)(3, momentum=momentum).to(device)
    convert_batch_norm(ours, device)
    mine = whole[rank * shape[0] : (rank + 1) * shape[0]].clone().requires_grad_()
    whole.requires_grad_()
    weight = torch.randn(whole.shape).to(device)
    for _ in range(2):
        expected, found = reference(whole), ours(mine)
        (expected * weight).sum().backward()
        (found * weight[rank * shape[0] : (rank + 1) * shape[0]]).sum().backward()
    part = slice(rank * shape[0], (rank + 1) * shape[0])
    torch.testing.assert_close(found, expected[part], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.grad, whole.grad[part], rtol=1e-4, atol=1e-4)
    for gradient, full in [(ours.weight.grad, reference.weight.grad), (ours.bias.grad, reference.bias.grad)]:
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, full, rtol=1e-4, atol=1e-3)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(getattr(ours, name), buffer, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.eval()(mine), reference.eval()(whole)[part], rtol=1e-4, atol=1e-4)


@PLUGINS
@distributed(world_size=2)
def test_running_statistics_of_instance_norms_are_those_of_all_samples(plugin):
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), norm, nn.Conv1d(4, 2, 3)).to(current_device())
    expected = copy.deepcopy(model)
    booster = Booster(plugin=plugin, mixed_precision="fp32")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(3):
        samples = torch.randn(4, 3, 9, generator=torch.Generator().manual_seed(step)).to(current_device())
        booster.backward(model(samples.chunk(2)[dist.get_rank()]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        expected(samples)
        torch.testing.assert_close(norm.running_mean, expected[1].running_mean)
        torch.testing.assert_close(norm.running_var, expected[1].running_var)


class NormAndScale(nn.BatchNorm1d):
    """A norm with a forward, a child and an attribute of its own, as timm's has."""

    def __init__(self, features):
        super().__init__(features)
        self.act = nn.PReLU()
        self.gain = 1.5

    def forward(self, input):
        return self.act(super().forward(input)) * self.gain


class FrozenNorm(nn.BatchNorm1d):
    """Normalizes by its running statistics, also in training, as detectors do."""

    def forward(self, input):
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, self.eps
        )


class OwnNorms(nn.Module):
    """Norms of several kinds, one with two names, one in a plain list, one with a hook."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scaled, self.frozen = NormAndScale(6), FrozenNorm(6)
        self.frozen.running_mean.fill_(0.3)
        self.first = nn.BatchNorm1d(6, momentum=None)
        self.second = self.first
        self.kept = [self.first]
        self.seen = []
        self.first.register_forward_hook(lambda module, args, output: self.seen.append(1))

    def forward(self, x):
        x = self.scaled(self.layers[0](x))
        x = self.frozen(self.layers[1](x))
        x = self.first(self.layers[2](x))
        x = self.kept[0](self.layers[3](x)) if isinstance(self.first, nn.BatchNorm1d) else x
        return self.second(x)


def _train(model, optimizer, backward, parts, penalty):
    losses = []
    for inputs in parts:
        inputs = inputs.clone().requires_grad_()
        outputs = model(inputs)
        loss = outputs.square().mean() + outputs[:, 0].sigmoid().mean()
        if penalty:
            (slope,) = torch.autograd.grad(outputs.sigmoid().square().sum(), inputs, create_graph=True)
            loss = loss + 0.1 * slope.square().sum(dim=1).mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@PLUGINS
@pytest.mark.parametrize("penalty", [False, True])
@distributed(world_size=2)
def test_norms_of_the_users_own_equal_one_process(plugin, penalty):
    torch.manual_seed(0)
    model = OwnNorms().to(current_device())
    expected = copy.deepcopy(model)
    expected.kept = [expected.first]
    booster = Booster(plugin=plugin, mixed_precision="fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    assert model.first is model.second is model.kept[0]
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    batches = [one.to(current_device()) for one in batches]
    mine = [one.chunk(2)[dist.get_rank()] for one in batches]
    found = _train(boosted, optimizer, lambda loss: booster.backward(loss, optimizer), mine, penalty)
    assert len(model.seen) == len(batches) * 3
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    wanted = _train(expected, reference, lambda loss: loss.backward(), batches, penalty)
    for one, other in zip(found, wanted, strict=True):
        dist.all_reduce(one)
        torch.testing.assert_close(one / 2, other, rtol=1e-4, atol=1e-5)
    state = boosted.state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
    if plugin == "torch_ddp":
        again = copy.deepcopy(model).eval()
        torch.testing.assert_close(again(batches[0]), expected.eval()(batches[0]), rtol=1e-3, atol=1e-4)


@distributed(world_size=2)
def test_a_model_that_is_a_batch_norm():
    model = nn.BatchNorm1d(3)
    expected = copy.deepcopy(model)
    booster = Booster(plugin="torch_ddp")
    boosted, *_ = booster.boost(model.to(booster.device), torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    found = boosted(batch.chunk(2)[dist.get_rank()].to(booster.device)).cpu()
    torch.testing.assert_close(found, expected(batch).chunk(2)[dist.get_rank()])
