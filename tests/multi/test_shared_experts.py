"""Shared experts compute while tokens travel, in forward and backward, whatever their place in the block's code."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload
from torch import nn
from zoo import TRANSFORMERS_MODULES
from zoo.small_configs import small_config

from booster.comm import AllToAll
from booster.core.shard_spec import ShardSpec
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.expert_parallel import dispatch
from booster.plugins.hybrid_parallel.expert_parallel.experts import ExpertParallelGroup, make_expert_parallel
from booster.plugins.hybrid_parallel.expert_parallel.plan import find_experts
from booster.plugins.hybrid_parallel.expert_parallel.shared_experts import DeferredTensor, overlap_shared_experts

preload(*TRANSFORMERS_MODULES)
pytestmark = pytest.mark.on_device

# Called before the routed experts, after them, and after them by the layer around the block.
MODELS = ["Qwen2MoeForCausalLM", "Glm4MoeForCausalLM", "GraniteMoeSharedForCausalLM"]


def make_model(class_name):
    """Returns a small model of transformers."""
    import transformers

    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(small_config(model_class.config_class, {}))
    return model.to(current_device())


def share(model, *, overlaps=True):
    """Shards the experts of a model over all ranks, in place."""
    group = ExpertParallelGroup.of(dist.group.WORLD)
    plan = find_experts(model, group.size, None)
    for entry in plan.entries:
        bounds = plan.bounds(entry)
        module = model.get_submodule(entry.name)
        for parameter in module.parameters():
            spec = ShardSpec.unsharded(parameter.shape).experts(bounds[group.rank], bounds[group.rank + 1])
            parameter.data = spec.shard(parameter.data)
        shared = overlap_shared_experts(model, entry.name) if overlaps else None
        make_expert_parallel(module, entry.name, group, bounds, is_stacked=entry.is_stacked, shared=shared)


def shared_layers(model):
    """Returns the last linear layer of every shared expert."""
    return [
        [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("shared_expert", "shared_experts", "shared_mlp")
    ]


@contextmanager
def recorded_messages():
    """Starts and ends of messages in their order; tests add what else happens."""
    found = []
    start, wait = dispatch.start_all_to_all, AllToAll.wait

    def noted_start(*args, **kwargs):
        found.append("start")
        return start(*args, **kwargs)

    def noted_wait(self):
        found.append("wait")
        return wait(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "start_all_to_all", noted_start)
        patch.setattr(AllToAll, "wait", noted_wait)
        yield found


def _in_flight(events, name):
    """Returns how many messages are in flight at each event of that name."""
    return [
        events[:place].count("start") - events[:place].count("wait") for place, one in enumerate(events) if one == name
    ]


@distributed(world_size=2)
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("class_name", MODELS)
def test_a_shared_expert_computes_while_messages_are_in_flight(class_name, overlaps):
    model = make_model(class_name)
    reference = copy.deepcopy(model)
    share(model, overlaps=overlaps)
    layers = shared_layers(model)
    tokens = torch.randint(90, (2, 6), generator=torch.Generator().manual_seed(dist.get_rank())).to(current_device())
    with recorded_messages() as events:
        for layer in layers:
            layer.register_forward_hook(lambda *given: events.append("shared"))
            layer.register_full_backward_hook(lambda *given: events.append("shared backward"))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    for name in ("shared", "shared backward"):
        counts = _in_flight(events, name)
        assert len(counts) == len(layers) > 0
        assert all(count > 0 for count in counts) if overlaps else not any(counts), (name, events)
    expected = reference(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for layer, other in zip(layers, shared_layers(reference), strict=True):
        torch.testing.assert_close(layer.weight.grad, other.weight.grad, rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
@pytest.mark.parametrize("class_name", MODELS)
def test_hooks_read_computed_tensors(class_name):
    model, seen = make_model(class_name), []
    share(model)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("shared_expert", "shared_experts", "shared_mlp", "experts", "block_sparse_moe"):
            module.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    tokens = torch.randint(90, (2, 6), generator=torch.Generator().manual_seed(dist.get_rank())).to(current_device())
    model(tokens, labels=tokens).loss.backward()
    assert seen
    assert DeferredTensor not in seen


class Block(nn.Module):
    """A block whose code does with the shared expert's output what a test says."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.experts = Stacked()
        self.shared_expert = nn.Linear(4, 4)

    def forward(self, tokens):
        index = torch.zeros(len(tokens), 1, dtype=torch.long, device=tokens.device)
        return self.use(self, tokens, index, torch.ones_like(index, dtype=tokens.dtype))


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, tokens, expert_index, weights):
        return torch.einsum("th,thk->tk", tokens, self.weight[expert_index[:, 0]]) * weights


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def _by_custom_function(block, tokens, *routing):
    return Doubled.apply(block.shared_expert(tokens)) + block.experts(tokens, *routing)


def _changed_in_place(block, tokens, *routing):
    tokens = tokens * 1
    shared = block.shared_expert(tokens)
    tokens.mul_(2)
    return shared + block.experts(tokens, *routing)


def _without_gradient(block, tokens, *routing):
    with torch.no_grad():
        shared = block.shared_expert(tokens)
    return shared + block.experts(tokens, *routing)


def _outside_of_autocast(block, tokens, *routing):
    with torch.autocast(tokens.device.type, enabled=False):
        shared = block.shared_expert(tokens)
    assert shared.dtype == torch.float32
    return block.experts(tokens, *routing) + shared


def _with_views(block, tokens, *routing):
    return block.experts(tokens, *routing).view(2, -1).reshape(-1, 4) + block.shared_expert(tokens)


@distributed(world_size=2)
@pytest.mark.parametrize("use", [_without_gradient, _outside_of_autocast, _with_views])
def test_the_result_is_that_of_the_block_alone(use):
    block = Block(use).to(current_device())
    expected = copy.deepcopy(block)
    share(block)
    tokens = torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank())).to(current_device())
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=use is _outside_of_autocast):
        output, reference = block(tokens), expected(tokens)
    torch.testing.assert_close(output, reference)
    output.sum().backward()
    reference.sum().backward()
    torch.testing.assert_close(block.shared_expert.weight.grad, expected.shared_expert.weight.grad)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (_by_custom_function, r"a custom autograd function got the output .*overlap_shared_experts=False"),
        (_changed_in_place, r"changed in place before its output was used. Use .*overlap_shared_experts=False"),
    ],
)
def test_what_cannot_be_deferred_is_an_error(use, message):
    block = Block(use).to(current_device())
    share(block)
    tokens = torch.ones(4, 4, device=current_device())
    with pytest.raises(ConfigError, match=message):
        block(tokens).sum().backward()
    dist.barrier()
