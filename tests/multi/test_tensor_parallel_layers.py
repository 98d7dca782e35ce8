"""Layers that are split over ranks against their serial twins: outputs, all gradients, communication."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload
from torch import nn
from transformers.pytorch_utils import Conv1D

from booster.comm import count_communication
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.embedding import (
    make_feature_parallel_embedding,
    make_vocab_parallel_embedding,
    make_vocab_parallel_head,
)
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.linear import make_column_parallel, make_row_parallel
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block, local_sizes, sharded_spec, vocabulary_spec

pytestmark = pytest.mark.on_device

preload("transformers.pytorch_utils")
WORLDS = [2, 3, 4]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
BATCH, SEQUENCE = 2, 5


class Cut:
    """Cuts the parameters of a twin, and remembers what the gradients have to be compared with."""

    def __init__(self):
        self.ranks = TensorParallelGroup()
        self.layouts = {}

    def shard(self, parameter, dim, blocks):
        layout = sharded_spec(parameter.shape, dim, blocks, self.ranks.size, self.ranks.rank)
        return self._cut_by(parameter, layout)

    def cut_rows(self, parameter, multiple):
        return self._cut_by(parameter, vocabulary_spec(parameter.shape, multiple, self.ranks.size, self.ranks.rank))

    def _cut_by(self, parameter, layout):
        parameter.data = layout.shard(parameter.data)
        self.layouts[parameter] = layout
        return parameter

    def expected_gradient(self, parameter, serial):
        layout = self.layouts.get(parameter)
        return serial.grad if layout is None else layout.shard(serial.grad)

    def column(self, module, blocks, **options):
        if isinstance(blocks, int):
            blocks = [Block(num_units=blocks)]
        self.shard(module.weight, int(isinstance(module, Conv1D)), blocks)
        if module.bias is not None:
            self.shard(module.bias, 0, blocks)
        make_column_parallel(module, self.ranks, sizes=local_sizes(blocks, self.ranks.size), **options)

    def row(self, module, blocks, **options):
        if isinstance(blocks, int):
            blocks = [Block(num_units=blocks)]
        self.shard(module.weight, int(not isinstance(module, Conv1D)), blocks)
        make_row_parallel(module, self.ranks, sizes=local_sizes(blocks, self.ranks.size), **options)


def drawn(*shape):
    return torch.randn(*shape).to(current_device())


def assert_close(actual, expected, dtype=torch.float32, what="", scale=None):
    assert actual.shape == expected.shape, what
    if expected.numel() == 0:
        return
    largest = expected.abs().max().float().clamp_min(1e-3) if scale is None else scale
    error = (actual.float() - expected.float()).abs().max() / largest
    assert error <= TOLERANCE[dtype], f"{what}: {error}"


def assert_same_gradients(cut, model, twin, dtype=torch.float32, scale=None):
    for (name, parameter), serial in zip(model.named_parameters(), twin.parameters(), strict=True):
        expected = cut.expected_gradient(parameter, serial)
        largest = serial.grad.abs().max().float().clamp_min(1e-3) if scale is None else scale
        assert_close(parameter.grad, expected, dtype, name, largest)


def assert_like_twin(cut, model, twin, x, dtype=torch.float32):
    """Compares output and all gradients; the twin is the model before it was cut."""
    ours, theirs = x.clone(), x.clone()
    if x.is_floating_point():
        ours.requires_grad_()
        theirs.requires_grad_()
    y, expected = model(ours), twin(theirs)
    assert y.dtype == expected.dtype
    assert_close(y, expected, dtype, "output")
    weights = torch.randn_like(expected)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    cut.ranks.reset()
    if x.is_floating_point():
        assert_close(ours.grad, theirs.grad, dtype, "input")
    assert_same_gradients(cut, model, twin, dtype)


class Pair(nn.Module):
    def __init__(self, kind, hidden, inner, bias=True):
        super().__init__()
        if kind is Conv1D:
            self.up, self.down = Conv1D(inner, hidden), Conv1D(hidden, inner)
        else:
            self.up, self.down = kind(hidden, inner, bias=bias), kind(inner, hidden, bias=bias)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class ScaledLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return nn.functional.linear(2 * x, self.weight, self.bias)


@distributed(WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bias"), [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)])
def test_a_pair_is_like_its_twin(world_size, kind, bias, dtype):
    for hidden, inner in ((6, 13), (1, world_size)):
        model = Pair(kind, hidden, inner, bias).to(current_device(), dtype)
        twin = copy.deepcopy(model)
        cut = Cut()
        cut.column(model.up, inner)
        cut.row(model.down, inner)
        assert isinstance(model.up, kind)
        assert_like_twin(cut, model, twin, drawn(BATCH, SEQUENCE, hidden).to(dtype), dtype)


@distributed(WORLDS)
def test_a_subclass_keeps_its_forward(world_size):
    model = Pair(ScaledLinear, 6, 9).to(current_device())
    twin = copy.deepcopy(model)
    cut = Cut()
    cut.column(model.up, 9)
    cut.row(model.down, 9)
    assert_like_twin(cut, model, twin, drawn(BATCH, SEQUENCE, 6))
    assert model.down.bias is not None


@distributed(WORLDS)
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_gathered_output_and_split_input(world_size, kind):
    model = Pair(kind, 5, 11).to(current_device())
    twin = copy.deepcopy(model)
    cut = Cut()
    cut.column(model.up, 11, gathers_output=True)
    cut.row(model.down, 11, splits_input=True)
    assert_like_twin(cut, model, twin, drawn(BATCH, SEQUENCE, 5))
    assert not cut.ranks.rng.is_entered


class Attention(nn.Module):
    """With a fused projection, or three, and grouped queries."""

    def __init__(self, hidden, num_heads, num_groups, head_dim, *, is_fused, dropout=0.0):
        super().__init__()
        self.head_dim, self.is_fused, self.dropout = head_dim, is_fused, dropout
        self.sizes = [num_heads * head_dim, num_groups * head_dim, num_groups * head_dim]
        self.queries = Block(num_units=num_heads, unit_size=head_dim, num_groups=num_groups, num_query_units=num_heads)
        self.groups = Block(num_units=num_groups, unit_size=head_dim, num_groups=num_groups, num_query_units=num_heads)
        if is_fused:
            self.qkv = nn.Linear(hidden, sum(self.sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(hidden, size) for size in self.sizes)
        self.o = nn.Linear(num_heads * head_dim, hidden)

    def split_over(self, cut):
        blocks = [self.queries, self.groups, self.groups]
        if self.is_fused:
            cut.column(self.qkv, blocks)
        else:
            siblings = (self.q, self.k, self.v)
            for module, block in zip(siblings, blocks, strict=True):
                cut.column(module, [block], siblings=siblings)
        cut.row(self.o, [self.queries])
        self.sizes = [local_sizes([block], cut.ranks.size)[cut.ranks.rank] for block in blocks]

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.sizes, -1) if self.is_fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (q, k, v))
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.o(attended.transpose(1, 2).flatten(2))


def sum_shared_heads(cut, model):
    """Sums the gradients of heads that several ranks hold, as hooks of the plugin do."""
    for parameter, layout in cut.layouts.items():
        whole = torch.zeros(layout.logical_shape, device=parameter.device)
        for region in layout.regions:
            target = tuple(slice(start, start + size) for start, size in region.logical)
            whole[target] = parameter.grad[tuple(slice(start, start + size) for start, size in region.local)]
        dist.all_reduce(whole)
        parameter.grad = layout.shard(whole)


@distributed(WORLDS)
@pytest.mark.parametrize("is_fused", [False, True])
def test_attention_is_like_its_twin(world_size, is_fused):
    cases = [(4, 4), (4, 2), (5, 5)] if world_size < 4 else [(4, 4), (4, 2), (8, 4), (4, 1)]
    for num_heads, num_groups in cases:
        if num_groups < world_size and num_heads % world_size:
            continue
        model = Attention(7, num_heads, num_groups, 3, is_fused=is_fused).to(current_device())
        twin, cut = copy.deepcopy(model), Cut()
        model.split_over(cut)
        x, weights = drawn(BATCH, SEQUENCE, 7), drawn(BATCH, SEQUENCE, 7)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = model(ours), twin(theirs)
        assert_close(y, expected, what="output")
        (y * weights).sum().backward()
        (expected * weights).sum().backward()
        sum_shared_heads(cut, model)
        assert_close(ours.grad, theirs.grad, what="input")
        # The gradient of the keys' bias is nothing but rounding, as it adds the same to all scores of a query.
        scale = max(parameter.grad.abs().max() for parameter in twin.parameters())
        assert_same_gradients(cut, model, twin, scale=scale)


def counted(run):
    with count_communication() as count:
        result = run()
    return Counter(count.calls), sum(count.sent.values()), result


@distributed(WORLDS)
def test_layers_communicate_once_each_way(world_size):
    hidden = 12
    numel = BATCH * SEQUENCE * hidden
    volume = 2 * (world_size - 1) * numel * 4 // world_size
    for model in (Pair(nn.Linear, hidden, 24), Attention(hidden, 4, 4, 3, is_fused=False)):
        cut = Cut()
        model.to(current_device())
        if isinstance(model, Pair):
            cut.column(model.up, 24)
            cut.row(model.down, 24)
        else:
            model.split_over(cut)
        x = drawn(BATCH, SEQUENCE, hidden).requires_grad_()
        calls, sent, y = counted(lambda model=model, x=x: model(x))
        assert (calls, sent) == ({"all_reduce": 1}, volume)
        calls, sent, _ = counted(lambda y=y: y.sum().backward())
        assert (calls, sent) == ({"all_reduce": 1}, volume)
        cut.ranks.reset()
        calls, sent, _ = counted(lambda model=model, x=x: model(x.detach()).sum().backward())
        assert calls == {"all_reduce": 1}  # the input's gradient is not needed


class Branches(nn.Module):
    """Layers that share an input in every way: twice by one layer, beside one that is not split, and of both kinds."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.whole = nn.Linear(4, 6), Conv1D(6, 4), nn.Linear(4, 4, bias=False)
        self.down = nn.Linear(6, 4)

    def forward(self, x):
        inner = self.gate(x).tanh() * self.up(x) + self.gate(x)
        return self.down(inner) + self.whole(x)


def split_branches():
    model, cut = Branches().to(current_device()), Cut()
    twin = copy.deepcopy(model)
    siblings = (model.gate, model.up)
    cut.column(model.gate, 6, siblings=siblings)
    cut.column(model.up, 6, siblings=siblings)
    cut.row(model.down, 6)
    return model, twin, cut


@distributed(WORLDS)
def test_layers_that_share_an_input_are_like_their_twins(world_size):
    model, twin, cut = split_branches()
    assert_like_twin(cut, model, twin, drawn(BATCH, SEQUENCE, 4))
    model, twin, cut = split_branches()
    for one in (model, twin):
        one.gate.weight.requires_grad_(False)
        one.up.bias.requires_grad_(False)
    x = drawn(3, 4)
    for one in (model, twin):
        one(x.requires_grad_()).square().sum().backward()
    for (name, parameter), serial in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (serial.grad is None)
        if serial.grad is not None:
            assert_close(parameter.grad, cut.expected_gradient(parameter, serial), what=name)


@distributed([2, 3])
def test_backward_may_come_again_or_ask_for_less(world_size):
    model, twin, cut = split_branches()
    x = drawn(BATCH, SEQUENCE, 4).requires_grad_()
    outputs = [one(x).square().sum() for one in (model, twin)]
    inputs = [torch.autograd.grad(y, x, retain_graph=True)[0] for y in outputs]
    assert_close(inputs[0], inputs[1], what="input")
    for _ in range(2):
        for y in outputs:
            y.backward(retain_graph=True)
    assert_same_gradients(cut, model, twin)
    copied = copy.deepcopy(model)
    assert copied.gate._split.siblings == (copied.gate, copied.up)


@distributed([2, 3])
def test_layers_can_be_differentiated_twice(world_size):
    model, twin, cut = split_branches()
    x = drawn(BATCH, SEQUENCE, 4).requires_grad_()
    for one in (model, twin):
        (gradient,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        cut.ranks.reset()
    assert_same_gradients(cut, model, twin)


class ScaledEmbedding(nn.Embedding):
    def forward(self, entries):
        return 3 * super().forward(entries)


@distributed(WORLDS)
@pytest.mark.parametrize(("num_entries", "multiple"), [(17, 8), (3, 64), (12, 1)])
def test_embeddings_are_like_their_twins(world_size, num_entries, multiple):
    for kind in (nn.Embedding, ScaledEmbedding):
        for padding in (None, 0, num_entries - 1):
            model = kind(num_entries, 5, padding_idx=padding).to(current_device())
            twin, cut = copy.deepcopy(model), Cut()
            cut.cut_rows(model.weight, multiple)
            make_vocab_parallel_embedding(model, cut.ranks, vocab_size=num_entries, multiple=multiple)
            entries = torch.randint(num_entries, (BATCH, SEQUENCE)).to(current_device())
            entries[0, :3] = num_entries - 1
            assert_like_twin(cut, model, twin, entries)
    for gathers in (True, False):
        model, cut = nn.Embedding(num_entries, 7).to(current_device()), Cut()
        twin, blocks = copy.deepcopy(model), [Block(num_units=7)]
        cut.shard(model.weight, 1, blocks)
        sizes = local_sizes(blocks, world_size)
        make_feature_parallel_embedding(model, cut.ranks, sizes=sizes, gathers_output=gathers)
        start = sum(sizes[: cut.ranks.rank])
        if not gathers:
            forward = twin.forward
            twin.forward = lambda x, f=forward, a=start, n=sizes[cut.ranks.rank]: f(x)[..., a : a + n]
            y, expected = model(entries), twin(entries)
            assert_close(y, expected)
            continue
        assert_like_twin(cut, model, twin, entries)


@distributed(WORLDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("num_entries", "multiple"), [(17, 8), (3, 64), (12, 1)])
def test_a_head_that_gathers_is_like_its_twin(world_size, bias, num_entries, multiple):
    for kind in (nn.Linear, ScaledLinear):
        model = kind(5, num_entries, bias=bias).to(current_device())
        twin, cut = copy.deepcopy(model), Cut()
        for parameter in model.parameters():
            cut.cut_rows(parameter, multiple)
        make_vocab_parallel_head(model, cut.ranks, vocab_size=num_entries, multiple=multiple, gathers_output=True)
        assert_like_twin(cut, model, twin, drawn(BATCH, SEQUENCE, 5))


@distributed([2])
def test_what_can_not_be_split_is_named(world_size):
    ranks = TensorParallelGroup()
    with pytest.raises(ConfigError, match="max_norm"):
        make_vocab_parallel_embedding(nn.Embedding(2, 2, max_norm=1.0), ranks, vocab_size=2, multiple=1)
    with pytest.raises(ConfigError, match="max_norm"):
        make_feature_parallel_embedding(nn.Embedding(2, 2, max_norm=1.0), ranks, sizes=[1, 1], gathers_output=True)
