"""Regions of split activations: what enters and leaves them, and which random numbers are drawn inside."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from hybrid_cases import on_tensor_axis
from hybrid_twins import Twins
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import get_model, needs_transformers

from booster.comm import all_gather_equal, count_communication, start_all_reduce, use_shared_memory
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel import mappings
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.linear import make_column_parallel, make_row_parallel
from booster.plugins.hybrid_parallel.tensor_parallel.moe import (
    make_identity_expert,
    make_latent_projection,
    make_output_all_reduce,
    make_sharded_experts,
)
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import even_sizes

pytestmark = pytest.mark.on_device

WORLDS = [2, 3, 4]


def drawn(rank, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(current_device(), dtype)


def random_numbers(*shape):
    return torch.randn(*shape, device=current_device())


def parts(whole, dim, sizes):
    return whole.split(list(sizes), dim)


@distributed(WORLDS, device="cpu")  # NCCL sums in the dtype in which they travel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_are_made_in_fp32_and_rounded_once(world_size, dtype):
    everything = [drawn(rank, 3, 5, 7, dtype=dtype) for rank in range(world_size)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = sum(one.to(wide) for one in everything).to(dtype)
    for transport in (True, False):
        use_shared_memory(transport)
        x = everything[dist.get_rank()].clone()
        summed = mappings.reduce_from_tp_region(x, TensorParallelGroup())
        torch.testing.assert_close(
            summed, expected, rtol=1e-6 if wide == dtype else 0, atol=1e-6 if wide == dtype else 0
        )
        assert torch.equal(x, everything[dist.get_rank()])
        start_all_reduce(x).wait()
        assert torch.equal(x, summed)
    use_shared_memory(None)


@distributed(WORLDS)
@pytest.mark.parametrize("length", [9, 12, 1])
def test_the_ways_of_a_sequence_and_back(world_size, length):
    """Along the first, a middle and the last dimension, evenly and not, contiguous and not."""
    rank, ranks = dist.get_rank(), TensorParallelGroup()
    sizes = even_sizes(length, world_size)
    for dim in (0, 1, 2):
        shape = [2, 3, 4]
        shape[dim] = length
        whole, gradients = drawn(99, *shape), [drawn(one, *shape) for one in range(world_size)]
        own, total = parts(whole, dim, sizes)[rank], sum(gradients)

        x = own.clone().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        y = mappings.all_gather_shards(x, ranks, sizes, dim)
        y.backward(gradients[rank])
        assert torch.equal(y, whole)
        torch.testing.assert_close(x.grad, parts(total, dim, sizes)[rank])

        x = gradients[rank].clone().requires_grad_()
        y = mappings.reduce_scatter_shards(x, ranks, sizes, dim)
        torch.testing.assert_close(y.detach(), parts(total, dim, sizes)[rank])
        y.backward(own)
        assert torch.equal(x.grad, whole)

        x = whole.clone().requires_grad_()
        y = mappings.scatter_to_tp_region(x, ranks, sizes, dim)
        assert torch.equal(y, own)
        y.backward(own)
        assert torch.equal(x.grad, whole)

        x = own.clone().requires_grad_()
        y = mappings.gather_from_tp_region(x, ranks, sizes, dim)
        assert torch.equal(y, whole)
        y.backward(whole)
        assert torch.equal(x.grad, own)


@distributed(WORLDS)
def test_flattened_batches_of_sequences(world_size):
    """Tokens of several sequences along one dimension: joined rank by rank, and taken apart the same way."""
    rank, ranks, length, batch = dist.get_rank(), TensorParallelGroup(), 7, 3
    sizes = even_sizes(length, world_size)
    whole = drawn(99, batch, length, 2)
    by_rank = torch.cat([part.reshape(-1, 2) for part in whole.split(sizes, 1)])
    own = whole.split(sizes, 1)[rank].reshape(-1, 2)
    ranks.sequence_length, ranks.num_sequences = length, batch
    assert torch.equal(mappings.all_gather_shards(own, ranks, ranks.token_sizes(is_flat=True), 0), by_rank)
    summed = mappings.reduce_scatter_shards(by_rank, ranks, ranks.token_sizes(is_flat=True), 0)
    torch.testing.assert_close(summed, world_size * own)


@distributed(WORLDS)
def test_features_of_uneven_sizes(world_size):
    rank, ranks = dist.get_rank(), TensorParallelGroup()
    sizes = [3 * one for one in range(world_size)]  # the first rank has none
    whole = drawn(99, 2, sum(sizes))
    own = parts(whole, -1, sizes)[rank]
    x = own.clone().requires_grad_()
    y = mappings.gather_from_tp_region(x, ranks, sizes)
    assert torch.equal(y, whole)
    y.backward(whole)
    assert torch.equal(x.grad, own)
    x = whole.clone().requires_grad_()
    y = mappings.scatter_to_tp_region(x, ranks, sizes)
    assert torch.equal(y, own)
    y.backward(own)
    assert torch.equal(x.grad, whole)


@distributed([2])
def test_regions_can_be_differentiated_twice(world_size):
    ranks = TensorParallelGroup()
    x = torch.randn(3, dtype=torch.float64, device=current_device(), requires_grad=True)
    weight = torch.full((), 1.0 + dist.get_rank(), dtype=torch.float64, device=current_device())
    y = mappings.reduce_from_tp_region(weight * mappings.copy_to_tp_region(x, ranks) ** 3, ranks)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(first, 9 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 18 * x)


@distributed([2])
def test_a_group_of_one_rank_communicates_nothing(world_size):
    groups = [dist.new_group([rank]) for rank in range(world_size)]
    ranks = TensorParallelGroup(groups[dist.get_rank()])
    x = torch.randn(2, 3, device=current_device(), requires_grad=True)
    with count_communication() as count:
        for y in (
            mappings.copy_to_tp_region(x, ranks),
            mappings.reduce_from_tp_region(x, ranks),
            mappings.gather_from_tp_region(x, ranks, [3]),
            mappings.scatter_to_tp_region(x, ranks, [2], 0),
        ):
            assert torch.equal(y, x)
    assert not count.calls
    assert copy.deepcopy(ranks) is ranks


class Block(nn.Module):
    """A pair with dropout within it and behind it."""

    def __init__(self, hidden, inner, rate):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.inside, self.behind = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x):
        return x + self.behind(self.down(self.inside(torch.tanh(self.up(x)))))


def split_blocks(count, rate, ranks, hidden=8, inner=6):
    torch.manual_seed(1)
    blocks = nn.Sequential(*(Block(hidden, inner, rate) for _ in range(count))).to(current_device())
    for block in blocks:
        make_column_parallel(block.up, ranks, sizes=[inner] * ranks.size)
        make_row_parallel(block.down, ranks, sizes=[inner] * ranks.size)
    return blocks


def is_same_on_all_ranks(tensor):
    rows = all_gather_equal(tensor.reshape(1, -1))
    return all(torch.equal(row, rows[0]) for row in rows)


@distributed(WORLDS)
def test_masks_differ_where_activations_are_split_only(world_size):
    ranks = TensorParallelGroup()
    blocks = split_blocks(2, 0.5, ranks)
    masks = {"inside": [], "behind": []}
    for block in blocks:
        for name, seen in masks.items():
            getattr(block, name).register_forward_hook(lambda m, a, y, seen=seen: seen.append((y == 0).float()))
    torch.manual_seed(7)
    blocks(random_numbers(4, 5, 8))
    assert not ranks.rng.is_entered
    for inside, behind in zip(masks["inside"], masks["behind"], strict=True):
        assert not is_same_on_all_ranks(inside)
        assert is_same_on_all_ranks(behind)
    assert not torch.equal(masks["inside"][0], masks["inside"][1])
    assert is_same_on_all_ranks(random_numbers(8))


@distributed([2])
def test_without_dropout_the_numbers_are_those_of_one_process(world_size):
    ranks = TensorParallelGroup()
    blocks, x = split_blocks(2, 0.5, ranks), random_numbers(2, 3, 8)
    torch.manual_seed(7)
    expected = random_numbers(5)
    torch.manual_seed(7)
    blocks.eval()(x)
    assert torch.equal(random_numbers(5), expected)
    for block in blocks:
        block.inside.p = block.behind.p = 0.0
    torch.manual_seed(7)
    blocks.train()(x)
    assert torch.equal(random_numbers(5), expected)


@distributed([2, 3])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("reaches", ["block", "up", "all"])
def test_checkpointing_draws_the_same_masks_again(world_size, use_reentrant, reaches):
    """Whole blocks, the whole model, and parts that end within a region."""
    ranks = TensorParallelGroup()
    blocks = split_blocks(3, 0.4, ranks)
    twin = copy.deepcopy(blocks)
    x = random_numbers(2, 3, 8).requires_grad_()

    def again(function, *args):
        return checkpoint(function, *args, use_reentrant=use_reentrant)

    def in_parts(block, x):
        inner = again(lambda one: block.inside(torch.tanh(block.up(one))), x)
        return x + block.behind(block.down(inner))

    def forward(model):
        y = x
        if reaches == "all":
            return again(model, y)
        for block in model:
            y = again(block, y) if reaches == "block" else in_parts(block, y)
        return y

    results = []
    for run, model in ((lambda model: model(x), blocks), (forward, twin)):
        torch.manual_seed(3)
        x.grad = None
        y = run(model)
        ranks.reset()
        y.square().sum().backward()
        ranks.reset()
        assert is_same_on_all_ranks(random_numbers(3))
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@distributed([2])
def test_a_region_that_is_not_left_ends_with_the_forward(world_size):
    ranks = TensorParallelGroup()
    up = nn.Linear(3, 4).to(current_device())
    make_column_parallel(up, ranks, sizes=[4, 4])
    nn.functional.dropout(up(random_numbers(2, 3)))
    assert ranks.rng.is_entered
    ranks.reset()
    assert is_same_on_all_ranks(random_numbers(3))


class Experts(nn.Module):
    """Every expert's inner features are split; each token goes to two experts."""

    def __init__(self, num_experts, hidden, inner):
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, inner, hidden))
        self.down = nn.Parameter(torch.randn(num_experts, hidden, inner))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        inner = torch.einsum("th,tkih->tki", hidden_states, self.up[top_k_index]).tanh()
        return torch.einsum("tki,tkhi,tk->th", inner, self.down[top_k_index], top_k_weights)


@distributed(WORLDS)
def test_split_experts_are_like_their_twin(world_size):
    rank, ranks, inner = dist.get_rank(), TensorParallelGroup(), 2 * world_size
    model = Experts(3, 4, inner).to(current_device())
    twin = copy.deepcopy(model)
    own = slice(2 * rank, 2 * rank + 2)
    model.up.data, model.down.data = model.up.data[:, own].clone(), model.down.data[..., own].clone()
    make_sharded_experts(model, ranks)
    router = nn.Linear(4, 3).to(current_device())
    hidden, results = torch.randn(5, 4).to(current_device()), []
    for experts in (model, twin):
        x = hidden.clone().requires_grad_()
        router.zero_grad()
        weights, index = router(x).softmax(-1).topk(2)
        y = experts(x, index, weights) if experts is twin else experts(x, index, top_k_weights=weights)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, router.weight.grad.clone()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.up.grad, twin.up.grad[:, own], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.down.grad, twin.down.grad[..., own], rtol=1e-5, atol=1e-5)


@distributed([2, 3])
def test_identity_experts_and_sums_of_outputs(world_size):
    ranks = TensorParallelGroup()
    block = nn.Sequential(nn.Identity())
    make_identity_expert(block[0], ranks)
    make_output_all_reduce(block, ranks)
    x = torch.randn(3).to(current_device())
    torch.testing.assert_close(block(x), x)


@distributed([2, 3])
def test_a_rotary_key_gets_the_gradient_of_all_heads(world_size):
    ranks = TensorParallelGroup()
    projection = nn.Linear(2, 5, bias=False).to(current_device())
    make_latent_projection(projection, ranks, num_rotary=2)
    projection(torch.ones(1, 2, device=current_device())).mul(dist.get_rank() + 1.0).sum().backward()
    total = float(sum(range(1, world_size + 1)))
    expected = torch.tensor([dist.get_rank() + 1.0] * 3 + [total] * 2)
    torch.testing.assert_close(projection.weight.grad[:, 0].cpu(), expected)


# Blocks that compute all tokens on each rank, in layers of which each rank has some tokens.

UNSHARDED_ATTENTION = {"layers.*.gate": "colwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
ATTENTION = {
    **{f"layers.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "layers.*.attention.out": "rowwise",
}


def gated_transformer():
    """Returns a model whose attention multiplies its output by what a replicated layer computes of all tokens."""
    model = get_model("user_transformer").build()
    for layer in model.layers:
        attention = layer.attention
        attention.share = nn.Linear(32, 1)
        attention.share.weight.data.fill_(0.1)
        attention.share.bias.data.zero_()
        attention.register_forward_hook(lambda own, given, output: output * own.share(given[0]).sigmoid())
    return model


@distributed([2, 3])
@pytest.mark.parametrize("mode", ["split_gather", "ring"])
@pytest.mark.parametrize(
    ("build", "plan", "block"),
    [
        (get_model("user_transformer").build, UNSHARDED_ATTENTION, "layers.0.attention"),
        (gated_transformer, {**ATTENTION, **UNSHARDED_ATTENTION}, "layers.1.attention"),
    ],
    ids=["unsharded", "gated"],
)
def test_attention_that_computes_all_tokens(world_size, mode, build, plan, block):
    arguments = on_tensor_axis(mode, world_size)[1]
    twins = Twins("user_transformer", build=build, plan=plan, zero_stage=1, **arguments)
    notes = twins.plugin.explain(build())
    assert f"{block.replace('0', '*').replace('1', '*')} computes all tokens on each rank" in str(notes)
    twins.train().assert_equal()


@needs_transformers
@distributed([2])
@pytest.mark.parametrize("mode", ["split_gather", "ring"])
def test_routers_and_experts_compute_all_tokens(mode):
    arguments = on_tensor_axis(mode, 2)[1]
    Twins("mixtral", gradient_checkpoint_config=True, **arguments).train().assert_equal()


def dropping(change):
    """Returns a model whose last attention was changed to draw random numbers."""
    model = get_model("user_transformer").build()
    change(model.layers[1].attention)
    return model


def with_a_module(attention):
    attention.out = nn.Sequential(attention.out, nn.Dropout(0.1))


def with_an_attribute(attention):
    attention.attention_dropout = 0.1  # for scaled_dot_product_attention


@distributed([2])
@pytest.mark.parametrize(
    ("change", "place"),
    [(with_a_module, r"attention.out.1"), (with_an_attribute, r"attention")],
    ids=["module", "rate"],
)
def test_random_numbers_of_all_tokens_are_refused(change, place):
    with pytest.raises(ConfigError, match=rf"layers.1.{place} draws random numbers \(\w+=0.1\)"):
        Twins(
            "user_transformer",
            build=functools.partial(dropping, change),
            plan=UNSHARDED_ATTENTION,
            **on_tensor_axis("split_gather", 2)[1],
        )
