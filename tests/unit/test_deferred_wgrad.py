"""Gradients of weights that wait: the same numbers and hooks as in one backward, whatever the layers and the order."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D
from zoo import get_model

from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig, checkpoint_layers
from booster.plugins.hybrid_parallel.tensor_parallel.deferred_wgrad import DeferredWeightGrads
from booster.plugins.hybrid_parallel.tensor_parallel.linear import defer_weight_gradients

TOLERANCE = 1e-6


class Named(nn.Linear):
    """A subclass without a forward of its own."""


class Scaled(nn.Linear):
    """A subclass with one."""

    def forward(self, input):
        return super().forward(input) * 0.5


class Twice(nn.Module):
    """Uses a weight twice, once through a layer that shares it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


class TiedHead(nn.Module):
    """A weight that is looked up, and multiplied with."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding((x[..., 0].abs() * 10).long() % 11))


class InPlace(nn.Module):
    """Changes what layers return."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        y = self.down(input=nn.functional.relu_(self.up(x)))
        y += x
        y[..., 0].mul_(2)
        return y


def frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


def on(weight):
    """Returns a layer of a weight that others can look into."""
    layer = nn.Linear(6, 6)
    return weight(layer)


MODELS = {
    "bias": lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 9, bias=False), nn.GELU(), nn.Linear(9, 6, bias=False)),
    "Conv1D": lambda: nn.Sequential(Conv1D(9, 6), nn.GELU(), Conv1D(4, 9)),
    "subclasses": lambda: nn.Sequential(Named(6, 9), nn.GELU(), Scaled(9, 6)),
    "twice": Twice,
    "tied head": TiedHead,
    "in place": InPlace,
    "frozen": frozen,
    "parametrized": lambda: nn.Sequential(on(parametrizations.weight_norm), nn.Linear(6, 6)),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
}
SHAPES = {"rows": (5, 6), "sequences": (2, 3, 6), "four": (2, 2, 3, 6), "none": (0, 6), "none of three": (2, 0, 6)}


def twins(name, *, dtype=torch.float32):
    """Returns a prepared model, its twin, and where its gradients wait."""
    torch.manual_seed(0)
    twin = MODELS[name]().to(dtype)
    model, gradients = copy.deepcopy(twin), DeferredWeightGrads()
    defer_weight_gradients(model, gradients)
    return model, twin, gradients


def backward(model, x, *, key=None, gradients=None, **options):
    """Returns the input's gradient."""
    x = x.clone().requires_grad_()
    y = model(x)
    seeds = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    with nullcontext() if key is None else gradients.deferring(key):
        y.backward(seeds, **options)
    return x.grad


def assert_same(model, twin, tolerance=TOLERANCE):
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            scale = float(theirs.grad.abs().max()) if theirs.grad.numel() else 0.0
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_backward(name, shape):
    if name == "attention" and shape != "sequences":
        pytest.skip("takes sequences")
    model, twin, gradients = twins(name)
    x = torch.randn(SHAPES[shape])
    for step in range(2):
        torch.testing.assert_close(
            backward(model, x, key="a", gradients=gradients), backward(twin, x), rtol=TOLERANCE, atol=TOLERANCE
        )
        assert len(gradients._pending) == 1, step
        gradients.compute("a")
        assert len(gradients._pending) == 0
        assert_same(model, twin)


@pytest.mark.parametrize("name", MODELS)
def test_outside_backward_is_what_it_was(name):
    model, twin, gradients = twins(name)
    x = torch.randn(2, 3, 6)
    ours, theirs = backward(model, x), backward(twin, x)
    assert ours is theirs is None or torch.equal(ours, theirs)
    assert len(gradients._pending) == 0
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, other.grad)


def test_linear_weights_wait_and_all_else_does_not():
    model, twin, gradients = twins("bias")
    backward(twin, torch.ones(2, 6))
    backward(model, torch.ones(2, 6), key=0, gradients=gradients)
    assert model[0].weight.grad is None
    assert model[2].weight.grad is None
    assert torch.equal(model[0].bias.grad, twin[0].bias.grad)
    assert torch.equal(model[2].bias.grad, twin[2].bias.grad)


def test_keys_may_be_computed_in_any_order():
    model, twin, gradients = twins("twice")
    batches = {("chunk", number): torch.randn(4, 6) for number in range(3)}
    for key, x in batches.items():
        backward(model, x, key=key, gradients=gradients)
        backward(twin, x)
    assert len(gradients._pending) == 3
    for key in reversed(batches):
        gradients.compute(key)
        gradients.compute(key)  # there is nothing left
    gradients.compute("unknown")
    assert_same(model, twin)


def test_backwards_under_one_key_add_up():
    model, twin, gradients = twins("bias")
    x = torch.randn(4, 6)
    for _ in range(2):
        backward(model, x, key=0, gradients=gradients)
        backward(twin, x)
    assert len(gradients._pending) == 1
    gradients.compute(0)
    assert_same(model, twin)


def test_discarded_gradients_are_gone():
    model, _, gradients = twins("bias")
    backward(model, torch.ones(2, 6), key=0, gradients=gradients)
    gradients.discard()
    assert len(gradients._pending) == 0
    gradients.compute(0)
    assert model[0].weight.grad is None


def test_a_failed_backward_ends_the_deferring():
    model, twin, gradients = twins("bias")
    model[2].weight.register_hook(lambda gradient: gradient)

    def fail(gradient):
        raise ValueError("on purpose")

    handle = model[0].bias.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        backward(model, torch.ones(2, 6), key=0, gradients=gradients)
    handle.remove()
    gradients.discard()
    model.zero_grad()
    assert not gradients.is_deferring
    backward(model, torch.ones(2, 6))
    backward(twin, torch.ones(2, 6))
    assert_same(model, twin)


def test_a_key_at_a_time():
    gradients = DeferredWeightGrads()
    with gradients.deferring(0), pytest.raises(RuntimeError, match="already being deferred"), gradients.deferring(1):
        pass
    with gradients.deferring(1):
        pass
    assert len(gradients._pending) == 0


@pytest.mark.parametrize("name", ["bias", "twice", "tied head"])
def test_hooks_see_gradients_and_only_these(name):
    """Hooks that change gradients, and hooks that take them from `.grad`; outside of the backward they are as ever."""
    model, twin, gradients = twins(name)
    seen = {id(model): [], id(twin): []}
    for one in (model, twin):
        for parameter_name, parameter in one.named_parameters():

            def change(gradient, place=(one, parameter_name)):
                seen[id(place[0])].append((place[1], "arrives", gradient.shape))
                return 2 * gradient

            def follow(parameter, place=(one, parameter_name)):
                assert parameter.grad is not None
                seen[id(place[0])].append((place[1], "is there", parameter.grad.shape))

            parameter.register_hook(change)
            parameter.register_post_accumulate_grad_hook(follow)
    hooks = [list(parameter._backward_hooks.values()) for parameter in model.parameters()]
    x = torch.randn(3, 6)
    backward(twin, x)
    backward(twin, x)
    weight = dict(model.named_parameters(remove_duplicate=False))[
        "head.weight" if name == "tied head" else "0.weight" if name == "bias" else "first.weight"
    ]
    for key in (0, 1):  # the second finds something in `.grad`
        before = len([event for event in seen[id(model)] if "weight" in event[0]])
        backward(model, x, key=key, gradients=gradients)
        assert [list(parameter._backward_hooks.values()) for parameter in model.parameters()] == hooks
        after = len([event for event in seen[id(model)] if "weight" in event[0]])
        assert after - before == (2 if name == "tied head" else 0)  # of what the embedding adds
        gradients.compute(key)
        assert weight.grad is not None
    assert_same(model, twin)
    if name != "tied head":
        assert sorted(seen[id(model)]) == sorted(seen[id(twin)])


def test_gradients_come_in_the_order_of_backward_one_by_one():
    """A gradient is in its place before the next one is made, in memory that is not copied."""
    model, _, gradients = twins("bias")
    order = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: order.append(name))
    backward(model, torch.randn(2, 6), key=0, gradients=gradients)
    order.clear()
    gradients.compute(0)
    assert order == ["2.weight", "0.weight"]


def test_only_inputs_and_output_gradients_are_kept():
    model, _, gradients = twins("bias")
    nodes = []
    before = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]  # of other tests

    class Marker:
        pass

    def mark(module, args, output):
        marker = Marker()
        output.grad_fn.metadata["marker"] = marker
        nodes.append(weakref.ref(marker))

    for module in model:
        module.register_forward_hook(mark)
    x = torch.randn(2, 3, 6)
    y = model(x.clone().requires_grad_())
    with gradients.deferring(0):
        y.sum().backward()
    assert all(node() is not None for node in nodes)
    del y
    assert not any(node() for node in nodes)

    others = {id(one) for one in before}
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and id(one) not in others]
    kept = [one for one in tensors if one.grad_fn is not None]
    assert not [one for one in kept if one.shape in ((2, 3, 6), (2, 3, 9), (6, 6), (6, 9))]
    matrices = {
        matrix.untyped_storage().data_ptr(): matrix.untyped_storage().nbytes()
        for waiting in gradients._pending[0].values()
        for pair in waiting._pairs
        for matrix in pair
    }
    # the inputs of both layers, the gradient between them, and the one that `sum` expands from a single number
    assert sum(matrices.values()) == 4 * (6 * 6 + 6 * 9 + 6 * 9 + 1)


def test_what_waits_goes_as_it_is_computed():
    model, _, gradients = twins("bias")
    backward(model, torch.randn(2, 6), key=0, gradients=gradients)
    waiting = list(gradients._pending[0].values())
    counts = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: counts.append(sum(len(one._pairs) for one in waiting)))
    gradients.compute(0)
    assert counts == [1, 0]


def test_a_change_in_place_is_noticed():
    model, _, gradients = twins("bias")
    x = torch.randn(2, 6)
    y = model(x)
    with gradients.deferring(0):
        y.sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        gradients.compute(0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_transformers_models(name, checkpoints):
    entry = get_model(name)
    twin, model, gradients = entry.build(), entry.build(), DeferredWeightGrads()
    defer_weight_gradients(model, gradients)
    if checkpoints:
        stack = "model.layers" if name == "llama" else "transformer.h"
        names = [f"{stack}.{index}" for index in range(len(model.get_submodule(stack)))]
        checkpoint_layers(model, names, GradientCheckpointConfig())
    losses = {}
    for step in range(2):
        batch = entry.make_batch(step, 2)
        for one, key in ((model, step), (twin, None)):
            loss = entry.loss(one, batch)
            with nullcontext() if key is None else gradients.deferring(key):
                torch.manual_seed(step)
                loss.backward()
            losses[one] = loss.detach()
        assert torch.equal(losses[model], losses[twin])
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
    tied = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    assert not [one for one in layers if id(one.weight) not in tied and one.weight.grad is not None]
    for key in (1, 0):
        gradients.compute(key)
    assert_same(model, twin, 2e-6)


def test_checkpointed_functions():
    model, twin, gradients = twins("twice")
    x = torch.randn(3, 6)
    backward(lambda x: checkpoint(model, x, use_reentrant=False), x, key=0, gradients=gradients)
    assert model.first.weight.grad is None
    gradients.compute(0)
    backward(twin, x)
    assert_same(model, twin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_formats(dtype):
    model, twin, gradients = twins("bias", dtype=dtype)
    x = torch.randn(3, 6, dtype=dtype)
    backward(model, x, key=0, gradients=gradients)
    assert model[0].weight.grad is None
    gradients.compute(0)
    backward(twin, x)
    assert_same(model, twin)


def test_autocast_computes_at_once():
    model, twin, gradients = twins("bias")
    x = torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), twin(x)
    assert ours.dtype is torch.bfloat16
    with gradients.deferring(0):
        ours.float().sum().backward()
    theirs.float().sum().backward()
    gradients.compute(0)
    assert_same(model, twin)


def test_a_graph_of_backward_is_computed_at_once():
    model, twin, gradients = twins("bias")
    x = torch.randn(3, 6)
    for one in (model, twin):
        with gradients.deferring(0):
            (first,) = torch.autograd.grad(one(x).tanh().sum(), one[0].weight, create_graph=True)
        first.square().sum().backward()
    assert len(gradients._pending) == 0
    assert_same(model, twin)


def test_gradients_of_named_tensors_alone():
    """`inputs=` and `autograd.grad` without a weight leave nothing of it."""
    model, twin, gradients = twins("bias")
    x = torch.randn(3, 6, requires_grad=True)
    with gradients.deferring(0):
        (found,) = torch.autograd.grad(model(x).sum(), x)
        model(x).sum().backward(inputs=[model[0].bias])
    assert len(gradients._pending) == 0
    assert model[0].weight.grad is None
    torch.testing.assert_close(found, torch.autograd.grad(twin(x).sum(), x)[0])


def test_functional_transforms_see_the_layers():
    model, twin, gradients = twins("bias")
    x = torch.randn(3, 6)
    for one in (model, twin):
        jacobian = torch.func.jacrev(lambda x, one=one: one(x))(x)
        other = torch.func.functional_call(one, {"0.weight": torch.ones(9, 6, requires_grad=True)}, (x,))
        with gradients.deferring(0):
            (jacobian.sum() + other.sum()).backward()
    gradients.compute(0)
    assert_same(model, twin)


def test_compiled_models():
    model, twin, gradients = twins("bias")
    x = torch.randn(3, 6)
    backward(torch.compile(model, backend="aot_eager"), x, key=0, gradients=gradients)
    gradients.compute(0)
    backward(twin, x)
    assert_same(model, twin)


def test_modules_keep_what_they_were():
    model, twin, gradients = twins("subclasses")
    assert [type(one).__name__ for one in model] == [type(one).__name__ for one in twin]
    assert all(isinstance(ours, type(theirs)) for ours, theirs in zip(model, twin, strict=True))
    assert list(model.state_dict()) == list(twin.state_dict())
    assert type(model[2]) is Scaled
    defer_weight_gradients(model, gradients)
    assert type(model[0]).__mro__[1] is Named  # once
    copied = copy.deepcopy(model)
    x = torch.randn(2, 6)
    backward(copied, x, key=0, gradients=gradients)
    assert copied[0].weight.grad is None
    gradients.compute(0)
    backward(twin, x)
    assert_same(copied, twin)
    assert model[0].weight.grad is None


def test_stages_do_not_see_each_other():
    ours, _, gradients = twins("bias")
    theirs, _, others = twins("bias")
    x = torch.randn(2, 6)
    y = theirs(ours(x).detach().requires_grad_() * 1.0)
    with gradients.deferring(0):
        y.sum().backward()
    assert theirs[0].weight.grad is not None
    assert len(gradients._pending) == len(others._pending) == 0


def test_modules_that_have_a_forward_of_their_own_at_hand():
    model = nn.Sequential(nn.Linear(6, 6))
    model[0].forward = lambda x: 3 * nn.functional.linear(x, model[0].weight)
    gradients = DeferredWeightGrads()
    defer_weight_gradients(model, gradients)
    torch.testing.assert_close(model(torch.ones(1, 6)), 3 * torch.ones(1, 6) @ model[0].weight.t())
    backward(model, torch.ones(1, 6), key=0, gradients=gradients)
    assert model[0].weight.grad is not None
