"""What people do to a parameter, before boost() or after it, under every plugin: hooks, marks, classes, freezing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gemini_models import WIDTH, Block, Stack, Twins, square_loss
from harness import distributed
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device

PLUGINS = {
    "torch_ddp": lambda: TorchDDPPlugin(find_unused_parameters=True),
    "zero 1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32", reduce_bucket_size_in_m=0.0005),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=0.0005),
    "gemini": lambda: GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 256}),
    "torch_fsdp": TorchFSDPPlugin,
    "torch_fsdp, grad op": lambda: TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP"),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1, precision="fp32"),
}
EVERY_PLUGIN = pytest.mark.parametrize("plugin", PLUGINS)


class AnyTwins(Twins):
    def make_plugin(self, plugin):
        return PLUGINS[plugin]()


class Tied(Stack):
    """Blocks that share a weight, beside a layer that is not used."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__(num_blocks=2, way=way)
        self.blocks[1].second.weight = self.blocks[0].first.weight
        self.unused = nn.Linear(3, 3)


def larger_half(gradient):
    """A hook that is not linear in the gradient, and scales with it."""
    return torch.where(gradient.abs() > gradient.abs().mean(), gradient, gradient / 4)


def sgd(model):
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def _twice(model, x, backward, rank, step):
    backward(square_loss(model(x)))
    backward(square_loss(model(-x)))


@pytest.mark.parametrize("way", ["plain", "non-reentrant"])
@EVERY_PLUGIN
@distributed(world_size=2)
def test_hooks_of_parameters_change_the_gradient_as_in_one_process(plugin, way):
    removed = []

    def build():
        model = Tied(way)
        model.blocks[0].first.weight.register_hook(larger_half)  # a tied one
        model.blocks[0].second.bias.register_hook(larger_half)
        removed.append(model.head.bias.register_hook(torch.zeros_like))
        model.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
        return model

    twins = AnyTwins(build, _twice, optimizer=sgd, plugin=plugin)
    for model in (twins.plain, twins.booster.unwrap_model(twins.model)):
        model.head.weight.register_hook(larger_half)
        model.blocks[1].first.weight.register_hook(larger_half)
        removed.append(model.blocks[1].first.bias.register_hook(torch.zeros_like))
    twins.train(range(2))
    for handle in removed:
        handle.remove()
    for model in (twins.plain, twins.model):  # a removed one's place may be taken
        dict(model.named_parameters())["head.bias"].register_hook(larger_half)
    twins.train(range(2, 4)).assert_equal()


@EVERY_PLUGIN
@distributed(world_size=2)
def test_hooks_of_accumulated_gradients_see_and_change_this_ranks_own(plugin):
    torch.manual_seed(0)
    model = Stack(num_blocks=2)
    plain, booster = copy.deepcopy(model), Booster(plugin=PLUGINS[plugin]())
    seen, expected = {}, {}

    def watch(where, name, parameter):
        def note(shown):
            assert isinstance(shown, nn.Parameter)
            where.setdefault(name, []).append(shown.grad.detach().clone())
            shown.grad.mul_(2 + dist.get_rank())

        return parameter.register_post_accumulate_grad_hook(note)

    before, after = ("blocks.0.first.weight", "head.bias"), ("blocks.1.second.weight", "head.weight")
    watched = [watch(seen, name, model.get_parameter(name)) for name in before]
    boosted, optimizer, *_ = booster.boost(model, sgd(model))
    watched += [watch(seen, name, booster.unwrap_model(boosted).get_parameter(name)) for name in after]
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).to(booster.device)
    plain.to(booster.device)
    booster.backward(square_loss(boosted(x)), optimizer)
    watched_of_plain = [watch(expected, name, plain.get_parameter(name)) for name in (*before, *after)]
    square_loss(plain(x)).backward()
    torch.testing.assert_close(seen, expected)
    optimizer.step()
    optimizer.zero_grad()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    sgd(plain).step()
    torch.testing.assert_close(dict(boosted.state_dict()), dict(plain.state_dict()))
    for handle in [*watched, *watched_of_plain]:
        handle.remove()
    booster.backward(square_loss(boosted(x)), optimizer)
    assert all(len(calls) == 1 for calls in seen.values())


class Marked(nn.Module):
    """Its forward asks for marks of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.head.weight.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * getattr(layer.first.weight, "factor", 1.0)
        return F.linear(x, self.head.weight * self.head.weight.factor, self.head.bias)


class MarkedSGD(torch.optim.SGD):
    """Steps by marks of parameters, as optimizers do that leave norms alone."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = getattr(parameter, "scale", 1.0)
                    parameter.data.add_(parameter.grad, alpha=-0.1 * scale)


@EVERY_PLUGIN
@distributed(world_size=2)
def test_marks_of_parameters_are_seen_by_forward_and_optimizer(plugin):
    def build():
        model = Marked()
        model.layers[0].second.weight.scale = 3.0
        return model

    twins = AnyTwins(build, optimizer=lambda model: MarkedSGD(model.parameters(), lr=0.1), plugin=plugin)
    for model in (twins.plain, twins.booster.unwrap_model(twins.model)):
        model.layers[1].first.weight.factor = 0.5
        model.head.bias.scale = 2.0
    twins.train(range(2)).assert_equal()
    assert dict(twins.model.named_parameters())["layers.0.second.weight"].scale == 3.0


@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_fsdp"])
@distributed(world_size=2)
def test_marks_reach_masters_of_half_precision(plugin):
    booster = Booster(plugin=PLUGINS[plugin](), mixed_precision=FP16NaiveMixedPrecision(initial_scale=1.0))
    model = nn.Linear(8, 8)
    model.weight.scale = 0.0
    boosted, optimizer, *_ = booster.boost(model, MarkedSGD(model.parameters(), lr=0.1))
    before = {name: one.clone() for name, one in boosted.state_dict().items()}
    booster.backward(boosted(torch.ones(2, 8, device=booster.device)).square().mean(), optimizer)
    optimizer.step()
    moved = {name: not torch.equal(one, before[name]) for name, one in boosted.state_dict().items()}
    assert moved == {"weight": False, "bias": True}


class Doubling(nn.Parameter):
    """A user's own class of parameters, which decides what operators do with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is F.linear else result


@EVERY_PLUGIN
@distributed(world_size=2)
def test_a_users_class_of_parameters_computes_as_in_one_process(plugin):
    def build():
        model = Stack(num_blocks=2)
        model.blocks[1].first.weight = Doubling(model.blocks[1].first.weight.detach())
        model.head.weight = Doubling(model.head.weight.detach())
        return model

    AnyTwins(build, plugin=plugin, optimizer=sgd).train(range(2)).assert_equal()


# Under torch_ddp what is frozen or not is settled at boost().
@pytest.mark.parametrize("plugin", [name for name in PLUGINS if name != "torch_ddp"])
@distributed(world_size=2)
def test_freezing_by_whatever_stands_for_a_parameter_holds(plugin):
    kept = []

    def build():
        model = Stack(num_blocks=2)
        kept.append(model.blocks[0].first.weight)
        return model

    twins = AnyTwins(build, plugin=plugin, optimizer=sgd)
    twins.train([0])
    for parameter in kept:  # the very tensor that went into boost()
        parameter.requires_grad_(False)
    before = twins.model.state_dict()["blocks.0.first.weight"].clone()
    twins.train([1])
    assert torch.equal(twins.model.state_dict()["blocks.0.first.weight"], before)
    for model in (twins.plain, twins.booster.unwrap_model(twins.model)):
        model.get_parameter("blocks.0.first.weight").requires_grad_(True)
    twins.train([2])
    for model in (twins.plain, twins.model):
        with torch.no_grad():
            model(twins.batch(0))  # weights may stay gathered after it
        for name in ("head.weight", "blocks.1.second.bias"):
            dict(model.named_parameters())[name].requires_grad_(False)
    before = twins.model.state_dict()["head.weight"].clone()
    twins.train([3]).assert_equal()
    assert torch.equal(twins.model.state_dict()["head.weight"], before)
    assert [one.requires_grad for one in kept] == [True, True]


@EVERY_PLUGIN
@distributed(world_size=2)
def test_an_evaluation_in_inference_mode_may_come_first(plugin):
    twins = AnyTwins(lambda: Stack(num_blocks=2), plugin=plugin, optimizer=sgd)
    with torch.inference_mode():
        twins.model(twins.batch(0))
    twins.train(range(2)).assert_equal()
