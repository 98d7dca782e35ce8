"""Functions that graphs contain as one operator: their gradients, what they keep for backward, and modules' methods."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from booster.core.opaque_operator import bind_handle, has_opaque_methods, opaque, opaque_method

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile itself

alive = weakref.WeakSet()


class Square(torch.autograd.Function):
    """Square whose nodes are counted."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.token = torch.zeros(1)
        alive.add(ctx.token)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def mix(x, weight, is_scaled, name, count):
    torch._dynamo.graph_break()  # what a compiler can't trace
    assert name == "mix"
    y = Square.apply(x @ weight) * (2 if is_scaled else 1)
    return y, (y.sum(-1, keepdim=True) * count).detach()


def shapes(x, weight, is_scaled, name, count):
    return x.new_empty(*x.shape[:-1], weight.shape[1]), x.new_empty(*x.shape[:-1], 1)


mixed = opaque(mix, shapes)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        y, scale = mixed(x.sin(), self.weight, True, "mix", x.shape[0])
        return x + self.out(y.tanh() / (1 + scale.abs()))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def run(forward, layers, x):
    for layer in layers:
        x = forward(layer, x)
    return x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_equal_layers_share_a_graph_and_have_the_gradients_of_eager_ones(backend, recomputes):
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    plain = copy.deepcopy(layers)
    compiled = torch.compile(Layer.forward, backend=backend, fullgraph=True)
    x = torch.randn(5, 4, requires_grad=True)  # as that of the later layers
    for _ in range(2):

        def forward(layer, x):
            return checkpoint(compiled, layer, x, use_reentrant=False) if recomputes else compiled(layer, x)

        output, expected = run(forward, layers, x), run(Layer.forward, plain, x)
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        expected.sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    for one, other in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    del output, expected
    gc.collect()
    assert not alive


def test_symbolic_sizes_share_a_graph():
    layer = Layer()
    compiled = torch.compile(Layer.forward, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (3, 5, 7):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(layer, x), layer(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_graph_stays_for_a_second_backward_and_goes_with_it():
    layer = Layer()
    compiled = torch.compile(Layer.forward, backend="aot_eager", fullgraph=True)
    output = compiled(layer, torch.randn(3, 4)).sum()
    output.backward(retain_graph=True)
    first = layer.weight.grad.clone()
    assert alive
    output.backward()
    torch.testing.assert_close(layer.weight.grad, 2 * first)
    del output
    gc.collect()
    assert not alive


def test_nothing_is_kept_without_gradients():
    layer = Layer()
    compiled = torch.compile(Layer.forward, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        output = compiled(layer, torch.randn(3, 4))
    assert not output.requires_grad
    gc.collect()
    assert not alive


def test_parameters_may_move_between_forward_and_backward():
    """Sharding plugins free a layer's weights after its forward, and gather them again."""
    torch.manual_seed(0)
    layer = Layer()
    plain = copy.deepcopy(layer)
    compiled = torch.compile(Layer.forward, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4, requires_grad=True)
    saved = []

    def pack(tensor):
        if tensor.data_ptr() != layer.weight.data_ptr():
            return tensor.detach()  # as hooks of plugins do, which loses attributes
        saved.append(tensor.detach().clone())
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: saved[one] if isinstance(one, int) else one):
        output = compiled(layer, x)
    assert saved
    layer.weight.data.fill_(float("nan"))
    (grad,) = torch.autograd.grad(output.sum(), x)
    other = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(plain(other).sum(), other)
    torch.testing.assert_close(grad, expected)


def test_autocast_holds_inside():
    def product(x, weight):
        torch._dynamo.graph_break()
        return F.linear(x, weight)

    def shape(x, weight):
        return F.linear(x, weight)

    called = opaque(product, shape)
    compiled = torch.compile(lambda x, weight: called(x, weight) + 1, backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = compiled(x, weight)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert weight.grad.dtype == torch.float32


class Chooser(nn.Module):
    """A module whose method depends on state that is its own."""

    def __init__(self, which):
        super().__init__()
        self.which = [which]
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def _choose(self, x):
        torch._dynamo.graph_break()
        return self.experts[self.which[0]](x)

    choose = opaque_method(_choose, torch.empty_like)

    def forward(self, x):
        return self.choose(x) + 1


def test_methods_find_their_module():
    modules = nn.ModuleList(Chooser(which) for which in (0, 1, 0))
    assert has_opaque_methods(Chooser)
    assert not has_opaque_methods(Layer)
    for module in modules:
        bind_handle(module)
    compiled = torch.compile(Chooser.forward, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    for module in modules:
        output = compiled(module, x)
        torch.testing.assert_close(output, module(x))
        output.sum().backward()
        used, unused = module.experts[module.which[0]], module.experts[1 - module.which[0]]
        assert used.weight.grad.abs().sum() > 0
        assert unused.weight.grad is None or not unused.weight.grad.any()


def test_a_copied_module_ends_the_graph_until_it_has_a_number():
    module = Chooser(0)
    bind_handle(module)
    copied = copy.deepcopy(module)
    copied.which[0] = 1
    compiled = torch.compile(Chooser.forward, backend="aot_eager")
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(copied, x), copied(x))
    assert counters["graph_break"]
    bind_handle(copied)
    counters.clear()
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(copied, x), copied(x))
    torch.testing.assert_close(compiled(module, x), module(x))
    assert not counters["graph_break"]
