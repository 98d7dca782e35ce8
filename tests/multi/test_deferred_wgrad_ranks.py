"""Gradients of weights that wait, of layers that are split over ranks: those of the same layers' ordinary backward."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import distributed, preload
from torch import nn
from transformers.pytorch_utils import Conv1D

from booster.comm import count_communication
from booster.device import current_device
from booster.plugins.hybrid_parallel.parallelize import all_reduce_replicated_grad
from booster.plugins.hybrid_parallel.tensor_parallel.deferred_wgrad import DeferredWeightGrads
from booster.plugins.hybrid_parallel.tensor_parallel.embedding import make_vocab_parallel_head
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.linear import (
    defer_weight_gradients,
    make_column_parallel,
    make_row_parallel,
)
from booster.plugins.hybrid_parallel.tensor_parallel.region_input import GatheredRegionInput
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import (
    Block,
    even_sizes,
    local_sizes,
    sharded_spec,
    vocabulary_spec,
)

pytestmark = pytest.mark.on_device

preload("transformers.pytorch_utils")
BATCH, LENGTH, HIDDEN, INNER, ENTRIES = 2, 5, 6, 8, 11
COLUMNS = ("query", "key", "value")


class Region(nn.Module):
    """Three layers that read its input, of which one is trained by others' gradients too, and one that sums."""

    def __init__(self, kind, bias):
        super().__init__()
        sizes = dict.fromkeys(COLUMNS, (HIDDEN, INNER)) | {"out": (INNER, HIDDEN)}
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, Conv1D(outputs, inputs) if kind is Conv1D else kind(inputs, outputs, bias=bias))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, hidden_states):
        mixed = self.query(hidden_states) * torch.sigmoid(self.key(hidden_states)) + self.value(hidden_states)
        return self.out(mixed) + self.value.weight.square().sum()


def split_region(ranks, kind, bias, *, reads_gathered):
    torch.manual_seed(0)
    model, blocks = Region(kind, bias).to(current_device()), [Block(num_units=INNER)]
    for name, parameter in model.named_parameters():
        if name != "out.bias":
            is_bias, is_out = name.endswith("bias"), name.startswith("out")
            dim = 0 if is_bias else int(is_out != (kind is Conv1D))
            parameter.data = sharded_spec(parameter.shape, dim, blocks, ranks.size, ranks.rank).shard(parameter.data)
    sizes, layers = local_sizes(blocks, ranks.size), [getattr(model, name) for name in COLUMNS]
    for layer in layers:
        make_column_parallel(layer, ranks, sizes=sizes, is_input_gathered=reads_gathered, siblings=layers)
    make_row_parallel(model.out, ranks, sizes=sizes)
    if reads_gathered:
        GatheredRegionInput(ranks, layers).attach(model)
    return model


def prepared(twin):
    model, gradients = copy.deepcopy(twin), DeferredWeightGrads()
    defer_weight_gradients(model, gradients)
    return model, gradients


def assert_same_gradients(model, twin):
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-6, atol=1e-6 * float(theirs.grad.abs().max()), msg=name
        )


def assert_waits(ranks, twin, inputs, loss, waiting):
    """Compares two backwards whose weights wait with ordinary ones, and what is communicated when."""
    model, gradients = prepared(twin)
    for key, x in enumerate(inputs):
        x = x.clone().requires_grad_()
        theirs, expected = x.clone().detach().requires_grad_(), None
        with count_communication() as ordinary:
            expected = loss(twin(theirs))
            expected.backward()
        ranks.reset()
        with count_communication() as ours:
            found = loss(model(x))
            with gradients.deferring(key):
                found.backward()
        ranks.reset()
        assert torch.equal(found, expected)
        torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-6, atol=1e-6)
        assert ours.calls == ordinary.calls
    assert len(gradients._pending) == len(inputs)
    for waits in gradients._pending.values():
        names = {name for name, parameter in model.named_parameters() if id(parameter) in waits}
        assert names == waiting
    for key in reversed(range(len(inputs))):
        with count_communication() as later:
            gradients.compute(key)
        assert not later.calls
    assert_same_gradients(model, twin)

    # and outside of it, to the bit
    again = copy.deepcopy(twin)
    for one in (model, again):
        one.zero_grad()
        loss(one(inputs[0].clone().requires_grad_())).backward()
        ranks.reset()
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


WEIGHTS = {"query.weight", "key.weight", "value.weight", "out.weight"}


@distributed([2, 3])
@pytest.mark.parametrize(("kind", "bias"), [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)])
@pytest.mark.parametrize("mode", [None, "split_gather", "ring"])
def test_split_layers(world_size, kind, bias, mode):
    """Overlapped backwards, products that wait for their layers, sums in chunks."""
    ranks = TensorParallelGroup(sequence_mode=mode)
    twin = split_region(ranks, kind, bias, reads_gathered=mode is not None)
    lengths = even_sizes(LENGTH, ranks.size)
    whole = [torch.randn(BATCH, LENGTH, HIDDEN).to(current_device()) for _ in range(2)]
    ranks.sequence_length = LENGTH
    inputs = whole if mode is None else [x.split(lengths, 1)[ranks.rank].contiguous() for x in whole]
    assert_waits(ranks, twin, inputs, lambda y: y.square().sum(), WEIGHTS)


@distributed(2)
@pytest.mark.parametrize("mode", [None, "ring"])
def test_a_graph_of_backward_is_computed_at_once(mode):
    ranks = TensorParallelGroup(sequence_mode=mode)
    twin = split_region(ranks, nn.Linear, True, reads_gathered=mode is not None)
    model, gradients = prepared(twin)
    ranks.sequence_length = 4
    x = torch.randn(BATCH, 4 if mode is None else 2, HIDDEN).to(current_device())
    for one in (model, twin):
        y = one(x.clone().requires_grad_()).square().sum()
        with gradients.deferring(0):
            found = torch.autograd.grad(y, list(one.parameters()), create_graph=True)
            sum(one.square().sum() for one in found).backward(create_graph=True)
        ranks.reset()
    assert len(gradients._pending) == 0
    assert_same_gradients(model, twin)


@distributed(2)
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_vocabulary_heads(gathers, bias):
    """Of rows that are padding, too: with a vocabulary of 11 in parts of 8 the second rank has 5 of them."""
    torch.manual_seed(0)
    ranks, twin = TensorParallelGroup(), nn.Linear(HIDDEN, ENTRIES, bias=bias).to(current_device())
    for parameter in twin.parameters():
        parameter.data = vocabulary_spec(parameter.shape, 16, ranks.size, ranks.rank).shard(parameter.data)
    make_vocab_parallel_head(twin, ranks, vocab_size=ENTRIES, multiple=16, gathers_output=gathers)
    targets = torch.arange(BATCH * LENGTH, device=current_device()) % ENTRIES
    inputs = [torch.randn(BATCH, LENGTH, HIDDEN).to(current_device()) for _ in range(2)]

    def loss(logits):
        return nn.functional.cross_entropy(logits.view(-1, ENTRIES), targets)

    assert_waits(ranks, twin, inputs, loss, {"weight"})


@distributed(2)
def test_sums_over_ranks_come_with_the_gradient():
    """Hooks of parameters that ranks share are collective: they run when the gradient is there, and only then."""
    torch.manual_seed(0)
    model, twin = (nn.Linear(HIDDEN, INNER).to(current_device()) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    gradients, ranks = DeferredWeightGrads(), TensorParallelGroup()
    for one in (model, twin):
        all_reduce_replicated_grad(one.weight, ranks.group)
    defer_weight_gradients(model, gradients)
    x = torch.randn(3, HIDDEN).to(current_device()) + ranks.rank
    with count_communication() as early, gradients.deferring(0):
        model(x).square().sum().backward()
    with count_communication() as late:
        gradients.compute(0)
    twin(x).square().sum().backward()
    assert not early.calls
    assert sum(late.calls.values()) == 1
    assert_same_gradients(model, twin)
