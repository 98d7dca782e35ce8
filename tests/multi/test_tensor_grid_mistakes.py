"""What models compute in and between the layers of a stack on a grid of ranks: as in one process, or an error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device

SQUARE, CUBE = {"tp_size": 4, "tp_mode": "2d"}, {"tp_size": 8, "tp_mode": "3d"}
PLAN = {"*.pair.up": "colwise", "*.pair.down": "rowwise"}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    """A layer whose own code reads an argument."""

    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x, scale=None):
        y = self.pair(x)
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    def __init__(self, between=None, layer=Layer):
        super().__init__()
        self.layers, self.between = nn.ModuleList([layer(), layer(), layer()]), between

    def forward(self, x, *arguments):
        for index, layer in enumerate(self.layers):
            x = layer(x, *arguments)
            if self.between is not None and index == 0:
                x = self.between(x)
        return x


def boosted(model, arguments=SQUARE):
    plugin = HybridParallelPlugin(precision="fp32", plan=PLAN, **arguments)
    return Booster(plugin=plugin).boost(model.to(current_device()))[0]


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x):
        return x + self.pair(x.softmax(-1))


class SummingOf(Summing):
    def forward(self, x, unknown):
        return super().forward(x) * unknown


@distributed(4)
def test_a_function_that_reduces_features():
    message = r"'layers.0' calls softmax\(\), but tp_mode='2d' divides the features"
    with pytest.raises(ConfigError, match=message):
        boosted(Model(layer=Summing))
    model = boosted(Model(layer=SummingOf))  # which can't be run before its arguments are known
    with pytest.raises(ConfigError, match=message):
        model(torch.randn(4, 12, device=current_device()), 1.0)


@distributed(4)
def test_a_function_that_reads_other_features():
    class Flipping(Layer):
        def forward(self, x):
            return super().forward(x).flip(-1)

    with pytest.raises(ConfigError, match=r"the layer 'layers\.0' computes something that depends on all of"):
        boosted(Model(layer=Flipping))


@distributed(4)
def test_what_a_model_computes_between_layers():
    x = torch.randn(4, 5, 12, device=current_device())
    for between in (lambda x: x + 0.5 * x.mean(-1, keepdim=True), lambda x: x.add_(x.mean(-1, keepdim=True))):
        model = boosted(Model(between))
        with pytest.raises(ConfigError, match=r"layer 1 of a stack got other hidden states .*'2d'.*\(2, 5, 6\)"):
            model(x)
    assert boosted(Model(lambda x: x.contiguous()))(x).shape == x.shape


class Dropping(Model):
    """A model that leaves out the second layer of some batches."""

    def forward(self, x):
        self.number = torch.rand([]).item()
        first, second, last = self.layers
        x = first(x)
        self.number = torch.rand([]).item()
        return last(second(x) if self.number < 0.5 else x)


@distributed(4)
def test_all_ranks_drop_the_same_layers():
    torch.manual_seed(0)
    model, x = boosted(Dropping()), torch.randn(4, 5, 12, device=current_device())
    torch.manual_seed(0)
    outcomes = []
    for _ in range(8):
        try:
            model(x)
            outcomes.append(True)
        except ConfigError as error:
            outcomes.append("layer 2 of a stack ran without the layers before it" not in str(error))
        assert outcomes[-1] == (model.module.number < 0.5)
    assert {True, False} == set(outcomes)
    of_ranks = [None] * 4
    dist.all_gather_object(of_ranks, outcomes)
    assert of_ranks == [outcomes] * 4


@distributed(4)
@pytest.mark.parametrize("num_examples", [4, 3, 2])
def test_an_argument_of_each_example(num_examples):
    torch.manual_seed(0)
    serial = Model().to(current_device())
    divided = boosted(copy.deepcopy(serial))
    x = torch.randn(num_examples, 5, 12, device=current_device())
    for shape in ((num_examples, 1, 1), (num_examples, 5, 12), (1, 1, 1)):
        scale, other = (torch.full(shape, 0.5, device=current_device()).requires_grad_() for _ in range(2))
        with torch.no_grad():
            scale.copy_(torch.rand(shape))
            other.copy_(scale)
        found, expected = divided(x, scale), serial(x, other)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        if shape[0] == num_examples:
            found.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(scale.grad, other.grad, rtol=0, atol=1e-4)


@distributed(8)
@pytest.mark.slow
def test_an_argument_of_each_example_on_a_cube():
    model = boosted(Model(), CUBE)
    x, scale = torch.randn(4, 5, 12, device=current_device()), torch.rand(4, 1, 1, device=current_device())
    with pytest.raises(ConfigError, match=r"layer 0 of a stack returned hidden states of shape \(4, 5, 6\) for 1 exam"):
        model(x, scale)


@distributed(4)
def test_attention_weights():
    config = LlamaConfig(
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    plugin = HybridParallelPlugin(precision="fp32", **SQUARE)
    model, *_ = Booster(plugin=plugin).boost(LlamaForCausalLM(config))
    with pytest.raises(ConfigError, match="attention weights, of which tp_mode='2d' gives each rank those of its own"):
        model(input_ids=torch.zeros(4, 6, dtype=torch.long, device=current_device()), output_attentions=True)


class Dropout(nn.Module):
    """Stochastic depth: leaves out what a layer computes of some examples."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if not self.training:
            return x
        shape = (x.shape[0], *(1 for _ in x.shape[1:]))
        if self.kind == "rand":
            return x * (torch.rand(shape, device=x.device) < 0.5)
        return x * x.new_empty(shape).bernoulli_(0.5)


class Stochastic(Layer):
    kind = "rand"

    def __init__(self):
        super().__init__()
        self.drop = Dropout(self.kind)

    def forward(self, x):
        return x + self.drop(self.pair(x))


class StochasticFill(Stochastic):
    kind = "bernoulli_"


def kept_examples(layer, arguments, **settings):
    """Returns which examples each layer keeps, by running layers that drop the others' changes, and gradients."""
    torch.manual_seed(0)
    plugin = HybridParallelPlugin(precision="fp32", plan=PLAN, **arguments, **settings)
    model = Model(layer=layer).to(current_device())
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept, found = [], []
    for one in model.module.layers:
        one.register_forward_pre_hook(lambda module, args: found.append(args[0].detach()))
        one.register_forward_hook(lambda module, args, output: found.append(output.detach()))
    x = torch.randn(16, 5, 12, device=current_device())
    loss = model(x).square().sum()
    for before, after in zip(found[::2], found[1::2], strict=True):
        size = min(len(before), len(after))  # the first gets all, and the last returns all
        changed = (before[:size] != after[:size]) if before.shape == after.shape else None
        kept.append(changed)
    booster.backward(loss, optimizer)
    optimizer.step()
    return kept, loss.item(), model(x).sum().item()


@distributed(4)
@pytest.mark.parametrize("layer", [Stochastic, StochasticFill], ids=["rand", "bernoulli_"])
def test_stochastic_depth_leaves_out_whole_examples(layer):
    (_, middle, _), loss, after = kept_examples(layer, SQUARE)
    kept = middle.flatten(1).any(1)
    assert torch.equal(kept, middle.flatten(1).all(1))
    of_ranks = [torch.empty_like(kept) for _ in range(4)]
    dist.all_gather(of_ranks, kept)
    assert torch.equal(of_ranks[0], of_ranks[1])  # of one row
    assert torch.equal(of_ranks[2], of_ranks[3])
    assert not torch.equal(of_ranks[0], of_ranks[2])
    assert kept_examples(layer, SQUARE, gradient_checkpoint_config=True)[1:] == (loss, after)


@distributed(8)
@pytest.mark.slow
def test_stochastic_depth_on_a_cube():
    (_, middle, _), *_ = kept_examples(Stochastic, CUBE)
    assert torch.equal(middle.flatten(1).any(1), middle.flatten(1).all(1))

    class Within(Pair):
        def forward(self, x):
            y = super().forward(x)
            return y * (torch.rand(x.shape[0], 1, 1, device=x.device) < 0.5)

    class Outer(Layer):
        def __init__(self):
            super().__init__()
            self.pair = Within()

    with pytest.raises(ConfigError, match=r"'layers.0.pair' draws random numbers of shape \(4, 1, 1\)"):
        boosted(Model(layer=Outer), CUBE)(torch.randn(16, 5, 12, device=current_device()))
