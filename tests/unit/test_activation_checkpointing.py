"""Layers that are computed again in backward: the same numbers, names and kinds as without."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig, checkpoint_layers

ALL = GradientCheckpointConfig()


class Layer(nn.Module):
    """A residual layer with dropout that takes a keyword argument, gives a tuple, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.4)
        self.num_forwards = 0

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, None]:
        """Maps (batch, 6) to (batch, 6)."""
        self.num_forwards += 1
        return x + scale * self.dropout(torch.tanh(self.linear(x))), None


class Stack(nn.Module):
    """Layers that run one after the other."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Maps (batch, 6) to (batch, 6)."""
        for layer in self.layers:
            x, _ = layer(x, scale=scale)
        return x


def stack(depth=4):
    torch.manual_seed(0)
    return Stack(depth)


def names(model):
    return [name for name, module in model.named_modules() if name.count(".") == 1 and name.startswith("layers.")]


def gradients(model, **given):
    """Returns loss and gradients of one step, by name, with the same random numbers each time."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(torch.randn(3, 6, requires_grad=True), **given).square().mean()
    loss.backward()
    return {"loss": loss.detach()} | {name: one.grad.clone() for name, one in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one), name


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_the_numbers_stay_with_dropout_keywords_and_tuples(ratio):
    plain, model = stack(), stack()
    checkpoint_layers(model, names(model), GradientCheckpointConfig(ratio=ratio))
    assert_same(gradients(model, scale=torch.tensor(0.5)), gradients(plain, scale=torch.tensor(0.5)))
    expected = {0.3: [2, 2, 1, 1], 1.0: [2, 2, 2, 2]}[ratio]
    assert [layer.num_forwards for layer in model.layers] == expected


@pytest.mark.parametrize(
    ("ratio", "depth", "num"), [(1.0, 4, 4), (0.5, 4, 2), (0.5, 5, 3), (0.01, 4, 1), (0.55, 100, 55), (0.07, 100, 7)]
)
def test_share_of_a_stack(ratio, depth, num):
    assert GradientCheckpointConfig(ratio=ratio).num_layers(depth) == num


def test_without_gradients_nothing_is_kept_or_computed_again():
    model = stack()
    checkpoint_layers(model, names(model), ALL)
    with torch.no_grad():
        model(torch.ones(1, 6))
    model.eval()
    model(torch.ones(1, 6)).sum().backward()
    assert [layer.num_forwards for layer in model.layers] == [2] * 4


def test_activations_are_not_kept():
    kept = []

    def size_of_saved(model):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
            model(torch.ones(50, 6, requires_grad=True))
        return sum(kept)

    model = stack()
    before = size_of_saved(model)
    checkpoint_layers(model, names(model), ALL)
    assert size_of_saved(model) <= before / 3


def test_names_kinds_and_copies():
    plain, model = stack(), stack()
    checkpoint_layers(model, names(model), ALL)
    checkpoint_layers(model, names(model), ALL)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(layer, Layer) and type(layer).__name__ == "Layer" for layer in model.layers)
    twin = copy.deepcopy(model)
    assert_same(gradients(twin), gradients(plain))
    assert [layer.num_forwards for layer in twin.layers] == [2] * 4
    assert [layer.num_forwards for layer in model.layers] == [0] * 4
    assert type(plain.layers[0]) is Layer


def test_hooks_run_once():
    model, calls = stack(), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append("before"))
        layer.register_forward_hook(lambda *_: calls.append("after"))
    checkpoint_layers(model, names(model), ALL)
    gradients(model)
    assert calls == ["before", "after"] * 4


def test_a_model_is_freed():
    model = stack()
    checkpoint_layers(model, names(model), ALL)
    gradients(model)
    gone = weakref.ref(model.layers[0])
    del model
    gc.collect()
    assert gone() is None


# transformers.


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    return LlamaForCausalLM(config), [f"model.layers.{index}" for index in range(2)]


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
    return GPT2LMHeadModel(config), [f"transformer.h.{index}" for index in range(2)]


def language_gradients(model):
    model.train()
    model.zero_grad()
    torch.manual_seed(1)
    tokens = torch.arange(10).reshape(2, 5)
    outputs = model(tokens, labels=tokens)
    outputs.loss.backward()
    return {"loss": outputs.loss.detach()} | {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("make", [llama, gpt2])
def test_models_of_transformers_and_their_caches(make):
    (plain, _), (model, layers) = make(), make()
    assert model.config.use_cache
    checkpoint_layers(model, layers, ALL)
    forwards = []
    for name in layers:
        model.get_submodule(name).get_submodule("mlp").register_forward_pre_hook(lambda *_: forwards.append(1))
    assert_same(language_gradients(model), language_gradients(plain))
    assert len(forwards) == 4
    assert list(model.state_dict()) == list(plain.state_dict())
    model.eval()
    tokens = torch.arange(4)[None]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **settings), plain.eval().generate(tokens, **settings))


def test_what_transformers_checkpoints_is_left_to_it():
    (plain, _), (model, layers) = llama(), llama()
    model.activation_checkpointing_enable()
    own = model.get_submodule(layers[0])._gradient_checkpointing_func
    checkpoint_layers(model, layers, ALL)
    assert model.get_submodule(layers[0])._gradient_checkpointing_func is own
    assert_same(language_gradients(model), language_gradients(plain))


def test_a_copy_of_a_model_of_transformers():
    (plain, _), (model, layers) = llama(), llama()
    checkpoint_layers(model, layers, ALL)
    assert_same(language_gradients(copy.deepcopy(model)), language_gradients(plain))
