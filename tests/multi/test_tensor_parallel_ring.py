"""Regions over which the sequence is split: gathered in one go or in chunks, they compute what one process does."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from harness import distributed, preload
from hybrid_cases import assert_hybrid_equals_serial, on_tensor_axis
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D
from zoo import TRANSFORMERS_MODULES

from booster.comm import all_reduce_sum, count_communication, use_shared_memory
from booster.plugins.hybrid_parallel.tensor_parallel import async_grad_reduce, collective_matmul, mappings
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.linear import make_column_parallel, make_row_parallel
from booster.plugins.hybrid_parallel.tensor_parallel.region_input import GatheredRegionInput
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block, even_sizes, local_sizes, sharded_spec

preload(*TRANSFORMERS_MODULES)
WORLDS = [2, 3, 4]
MODES = ["split_gather", "ring"]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
BATCH, HIDDEN, INNER = 2, 6, 9


class Region(nn.Module):
    """Three layers that read its input, one of them changed in place, and one that sums."""

    def __init__(self, kind=nn.Linear, bias=True):
        super().__init__()
        layers = {"query": (HIDDEN, INNER), "key": (HIDDEN, INNER), "value": (HIDDEN, INNER), "out": (INNER, HIDDEN)}
        for name, (inputs, outputs) in layers.items():
            layer = Conv1D(outputs, inputs) if kind is Conv1D else kind(inputs, outputs, bias=bias)
            self.add_module(name, layer)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, hidden_states):
        query = self.query(hidden_states)
        query *= 0.5
        return self.out(query * torch.sigmoid(self.key(hidden_states)) + self.value(hidden_states))


COLUMNS = ("query", "key", "value")


def parallel(model, mode, columns=COLUMNS):
    """Returns a twin whose layers have this rank's parts, its ranks, and the layouts of its parameters by name."""
    model, ranks = copy.deepcopy(model), TensorParallelGroup(sequence_mode=mode)
    blocks, layouts = [Block(num_units=INNER)], {}
    for name, parameter in model.named_parameters():
        owner, _, kind = name.partition(".")
        if owner == "out" and kind == "bias":
            continue
        dim = 0 if kind == "bias" else int((owner == "out") != isinstance(model.out, Conv1D))
        layouts[name] = sharded_spec(parameter.shape, dim, blocks, ranks.size, ranks.rank)
        parameter.data = layouts[name].shard(parameter.data)
    sizes = local_sizes(blocks, ranks.size)
    for name in columns:
        make_column_parallel(getattr(model, name), ranks, sizes=sizes, is_input_gathered=True)
    make_row_parallel(model.out, ranks, sizes=sizes)
    GatheredRegionInput(ranks, [getattr(model, name) for name in columns]).attach(model)
    return model, ranks, layouts


def own_tokens(whole, size, rank, *, flat=False):
    part = whole.split(even_sizes(whole.shape[1], size), 1)[rank]
    return part.reshape(-1, part.shape[-1]) if flat else part


def assert_close(actual, expected, tolerance, what=""):
    assert actual.shape == expected.shape, what
    if expected.numel():
        error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-3)
        assert error <= tolerance, f"{what}: {error}"


def assert_like_twin(twin, mode, length, *, flat=False, keyword=False, run=None, columns=COLUMNS, wide=None):
    """Compares output and all gradients with the twin's; returns all of them, and what was communicated."""
    dtype = next(twin.parameters()).dtype
    model, ranks, layouts = parallel(twin, mode, columns)
    ranks.sequence_length, ranks.num_sequences = length, BATCH
    drawn = torch.randn(BATCH, length, HIDDEN, generator=torch.Generator().manual_seed(length)).to(dtype)
    cut = functools.partial(own_tokens, size=ranks.size, rank=ranks.rank, flat=flat)
    ours, theirs = cut(drawn).clone().requires_grad_(), drawn.clone().requires_grad_()
    with count_communication() as forward:
        if run is not None:
            y = run(model, ours)
        else:
            y = model(hidden_states=ours) if keyword else model(ours)
    assert not ranks.precomputed._entries
    twin.zero_grad()
    expected = twin(theirs)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with count_communication() as backward:
        (y * cut(weights)).sum().backward()
    (expected * weights).sum().backward()
    ranks.reset()
    tolerance = TOLERANCE[dtype]
    largest = theirs.grad.abs().max()
    assert_close(y, cut(expected), tolerance, "output")
    assert (ours.grad - cut(theirs.grad)).numel() == 0 or (
        ours.grad - cut(theirs.grad)
    ).abs().max() <= tolerance * largest
    for name, parameter in model.named_parameters():
        serial = twin.get_parameter(name).grad
        if name in layouts:
            found, serial = parameter.grad, layouts[name].shard(serial)
        else:  # of this rank's tokens
            found = all_reduce_sum(parameter.grad.float(), None).to(dtype)
        assert_close(found, serial, tolerance, name)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [y.detach(), ours.grad, *gradients], forward, backward


@distributed(WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bias"), [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)])
def test_a_region_is_like_its_twin(world_size, kind, bias, dtype):
    """Even and odd lengths, one and several tokens per chunk, ranks with none; the bytes are the same in both modes."""
    torch.manual_seed(0)
    twin = Region(kind, bias).to(dtype)
    for length in (48, 37, 4, 1):
        for flat in (False, True):
            found = {mode: assert_like_twin(twin, mode, length, flat=flat, keyword=flat) for mode in MODES}
            for ours, theirs in zip(found["ring"][0], found["split_gather"][0], strict=True):
                assert_close(ours, theirs, TOLERANCE[dtype])
            for count in (1, 2):
                ring, together = found["ring"][count], found["split_gather"][count]
                assert dict(ring.sent) == dict(together.sent)
                assert dict(ring.received) == dict(together.received)
                assert together.calls["all_gather"] == together.calls["reduce_scatter"] == 1
                longest = even_sizes(length, world_size)[0] * (BATCH if flat else 1)
                num_chunks = len(range(0, longest, -(-longest // 4)))
                assert ring.calls["all_gather"] == ring.calls["reduce_scatter"] == num_chunks


@distributed([2, 3])
def test_messages_instead_of_shared_memory(world_size):
    use_shared_memory(False)
    for mode in MODES:
        assert_like_twin(Region(), mode, 13)
    use_shared_memory(None)


@distributed(WORLDS)
def test_sums_of_low_precision_are_rounded_once(world_size):
    """The row-parallel products of all ranks are summed in fp32, as in one go."""
    torch.manual_seed(0)
    x = torch.randn(2, 11, INNER).bfloat16()
    layer = nn.Linear(INNER, 64, bias=False).bfloat16()
    ranks = TensorParallelGroup(sequence_mode="ring")
    layer.weight.data = layer.weight.data * (1 + ranks.rank)
    expected = mappings.reduce_scatter_shards(layer(x), ranks, even_sizes(x.shape[1], ranks.size), 1)
    make_row_parallel(layer, ranks, sizes=[INNER] * world_size)
    assert_close(layer(x), expected, 2**-8)


@pytest.mark.parametrize("mode", MODES)
@distributed([2])
def test_layers_computed_again_are_like_their_twin(mode, world_size):
    """The whole region, and a part of it that reads the input, by both kinds of checkpoint."""

    class Inside(Region):
        def forward(self, hidden_states):
            if is_checkpointed[0]:
                return checkpoint(super().forward, hidden_states, use_reentrant=is_checkpointed[1])
            return super().forward(hidden_states)

    for is_reentrant in (False, True):
        is_checkpointed = [False, False]
        run = functools.partial(checkpoint, use_reentrant=is_reentrant)
        assert_like_twin(Region(), mode, 11, run=run)
        is_checkpointed = [True, is_reentrant]
        assert_like_twin(Inside(), mode, 11)


@pytest.mark.parametrize("mode", MODES)
@distributed([2])
def test_layers_called_with_anything_else(mode, world_size):
    """Twice, with another tensor, or with the input after it was changed: they multiply."""

    class Twice(Region):
        def forward(self, hidden_states):
            first = self.query(hidden_states) + self.query(hidden_states) * self.key(2 * hidden_states)
            return self.out(first + self.value(hidden_states + 1))

    class Changed(Region):
        def forward(self, hidden_states):
            hidden_states += 1
            return self.out(self.query(hidden_states))

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(3 * x)

    class WithSideWay(Region):
        def forward(self, hidden_states):
            return (
                super().forward(hidden_states) if hidden_states.dim() == 2 else super().forward(hidden_states.clone())
            )

    assert_like_twin(Twice(), mode, 11)
    assert_like_twin(Region(Other), mode, 11)
    assert_like_twin(WithSideWay(), mode, 11)
    twin = Changed()
    model, ranks, _ = parallel(twin, mode)
    ranks.sequence_length = 6
    x = torch.randn(BATCH, 6, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_close(model(own_tokens(x, 2, ranks.rank).clone()), own_tokens(twin(x), 2, ranks.rank), 1e-6)


@pytest.mark.parametrize("mode", MODES)
@distributed([2])
def test_a_layer_that_is_not_called_has_no_gradient(mode, world_size):
    class Partial(Region):
        def forward(self, hidden_states):
            return self.out(self.query(hidden_states) + hidden_states.mean())

    model, ranks, _ = parallel(Partial(), mode)
    called = []
    model.key.weight.register_hook(called.append)
    ranks.sequence_length = 8
    model(torch.randn(BATCH, 4, HIDDEN, requires_grad=True)).sum().backward()
    assert model.key.weight.grad is None
    assert not called
    assert model.query.weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
@distributed([2])
def test_backward_may_come_again_or_ask_for_less(mode, world_size):
    model, ranks, _ = parallel(Region().double(), mode)
    ranks.sequence_length = 9
    x = torch.randn(BATCH, 5 - ranks.rank, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = model(x)
    y.sum().backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()], x.grad.clone()
    y.sum().backward(retain_graph=True)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [2 * one for one in once[0]])
    torch.testing.assert_close(x.grad, 2 * once[1])
    (alone,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.testing.assert_close(alone, once[1])
    weights = [model.query.weight, model.out.weight]
    found = torch.autograd.grad(y.sum(), weights, retain_graph=True)
    torch.testing.assert_close(list(found), [once[0][0], once[0][6]])
    with torch.autograd.detect_anomaly(check_nan=True):
        (alone,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(alone, once[1])


@distributed([2])
def test_second_derivatives_are_the_same_in_both_modes_and_without_products(world_size):
    twin, found = Region().double(), []
    for mode, columns in (("split_gather", COLUMNS), ("ring", COLUMNS), ("split_gather", ())):
        model, ranks, _ = parallel(twin, mode, COLUMNS)
        if not columns:
            model._forward_pre_hooks.clear()
            model._forward_pre_hooks_with_kwargs.clear()
            model._forward_hooks.clear()
            model._forward_hooks_with_kwargs.clear()
        ranks.sequence_length = 7
        x = torch.linspace(-1, 1, BATCH * 7 * HIDDEN, dtype=torch.float64).view(BATCH, 7, HIDDEN)
        x = own_tokens(x, 2, ranks.rank).clone().requires_grad_()
        y = model(x if columns else mappings.all_gather_shards(x, ranks, ranks.token_sizes(is_flat=False), 1))
        first = torch.autograd.grad(y.square().sum(), [x, *model.parameters()], create_graph=True)
        sum(one.square().sum() for one in first).backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for ours in found[:2]:
        torch.testing.assert_close(ours, found[2])


@pytest.mark.parametrize("mode", MODES)
@distributed([2])
def test_without_gradients_and_with_some(mode, world_size):
    twin = Region()
    x = torch.randn(BATCH, 6, HIDDEN, generator=torch.Generator().manual_seed(0))
    for context in (torch.no_grad, torch.inference_mode):
        model, ranks, _ = parallel(twin, mode)
        ranks.sequence_length = 6
        with context():
            y = model(own_tokens(x, 2, ranks.rank))
            expected = twin(x)
        assert_close(y, own_tokens(expected, 2, ranks.rank), 1e-6)
        assert not y.requires_grad
    model, ranks, layouts = parallel(twin, mode)
    ranks.sequence_length = 6
    twin.zero_grad()
    for one in (model, twin):
        for name in ("query.weight", "value.bias", "out.weight"):
            one.get_parameter(name).requires_grad_(False)
    model(own_tokens(x, 2, ranks.rank)).square().sum().backward()
    twin(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (twin.get_parameter(name).grad is None)
        if name in layouts and parameter.grad is not None:
            assert_close(parameter.grad, layouts[name].shard(twin.get_parameter(name).grad), 1e-6, name)


@pytest.mark.parametrize("mode", MODES)
@distributed([2])
def test_autocast_multiplies_as_it_does_elsewhere(mode, world_size):
    twin = Region()
    model, ranks, _ = parallel(twin, mode)
    ranks.sequence_length = 8
    x = torch.randn(BATCH, 8, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16), count_communication() as count:
        y = model(own_tokens(x, 2, ranks.rank))
        expected = twin(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert count.calls["all_gather"] == count.calls["reduce_scatter"] == 1
    assert_close(y, own_tokens(expected, 2, ranks.rank), 2e-2)


@distributed([2])
def test_transfers_are_under_way_while_products_are_computed(world_size):
    """What is started and waited for, and which gradients of weights are computed between."""
    events = []

    def started(start, name):
        def starting(*args, **kwargs):
            events.append(f"start {name}")
            transfer = start(*args, **kwargs)
            for end in ("wait", "finish"):
                method = getattr(transfer, end, None)
                if method is not None:
                    setattr(transfer, end, functools.partial(ended, method, name))
            return transfer

        return starting

    def ended(method, name, *args, **kwargs):
        events.append(f"end {name}")
        return method(*args, **kwargs)

    def deferred(self, arrived):
        events.append("weight")
        return gradient(self, arrived)

    gradient = async_grad_reduce.WGradOperands.gradient
    with pytest.MonkeyPatch.context() as patch:
        for module in (collective_matmul, mappings):
            for name in ("start_all_gather", "start_reduce_scatter"):
                patch.setattr(module, name, started(getattr(module, name), name.removeprefix("start_")))
        patch.setattr(async_grad_reduce.WGradOperands, "gradient", deferred)
        for mode, num_chunks in (("split_gather", 1), ("ring", 4)):
            model, ranks, _ = parallel(Region(), mode)
            ranks.sequence_length = 16
            x = torch.randn(BATCH, 8, HIDDEN, requires_grad=True)
            events.clear()
            y = model(x)
            gather, scatter = ["start all_gather", "end all_gather"], ["start reduce_scatter", "end reduce_scatter"]
            gathers = gather
            if num_chunks > 1:
                gathers = [gather[0], *[gather[0], gather[1]] * (num_chunks - 1), gather[1]]
            assert events == [*gathers, *[scatter[0]] * num_chunks, *[scatter[1]] * num_chunks]
            events.clear()
            y.sum().backward()
            assert events == [
                *gathers,
                *[scatter[0]] * num_chunks,
                *["weight"] * len(COLUMNS),
                *[scatter[1]] * num_chunks,
            ]


@distributed([2])
def test_what_waits_is_forgotten(world_size):
    class Failing(Region):
        def forward(self, hidden_states):
            raise ArithmeticError

    model, ranks, _ = parallel(Failing(), "ring")
    ranks.sequence_length = 4
    with pytest.raises(ArithmeticError):
        model(torch.randn(BATCH, 2, HIDDEN))
    assert ranks.precomputed._entries
    ranks.reset()
    assert not ranks.precomputed._entries


# Tables of ours and shipped plans, Conv1D, flattened tokens, not causal, odd lengths; weights that arrive late.
@pytest.mark.parametrize(
    ("model", "size", "arguments"),
    [
        ("llama", 2, {"gradient_checkpoint_config": True}),
        ("llama", 4, {"overlap_allgather": True}),
        ("gpt2", 2, {"overlap_allgather": True}),
        ("gpt2", 3, {}),
        ("opt", 2, {"gradient_checkpoint_config": {"ratio": 0.5}}),
        ("bert", 2, {}),
        ("t5", 2, {}),
    ],
    ids=str,
)
def test_models_in_chunks_equal_serial(model, size, arguments):
    assert_hybrid_equals_serial(
        model, on_tensor_axis("ring", size), zero_stage=1, max_norm=0.5, steps=3, arguments=arguments
    )


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_models_in_chunks_of_low_precision_equal_serial(model):
    assert_hybrid_equals_serial(model, on_tensor_axis("ring", 2), precision="bf16", max_norm=0.5, steps=3)
