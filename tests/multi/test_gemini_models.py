"""GeminiPlugin: models as they are, whatever way they use their weights, train as in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from gemini_models import (
    CHECKPOINTED,
    CHUNK,
    MODELS,
    POLICIES,
    WIDTH,
    AdaptedStack,
    Block,
    DataclassOutput,
    Lookup,
    Stack,
    Twins,
    seeded,
    square_loss,
    tokens_of,
)
from harness import distributed
from torch import nn

from booster import Booster, ConfigError
from booster.device import current_device
from booster.plugins import GeminiPlugin

pytestmark = pytest.mark.on_device

PLACED = pytest.mark.parametrize("policy", ["static", pytest.param("prefetch", marks=pytest.mark.slow), "cpu"])


def in_turn(names):
    """Everything under all policies; by default each under one of two, in turn."""
    return [
        pytest.param(policy, name, marks=() if policy == ("static", "cpu")[number % 2] else pytest.mark.slow)
        for number, name in enumerate(names)
        for policy in ("static", "prefetch", "cpu")
    ]


@pytest.mark.parametrize(("policy", "model"), in_turn(MODELS))
@distributed(world_size=2)
def test_a_model_as_it_is_trains_as_in_one_process(model, policy):
    build = seeded(MODELS[model])
    plain = seeded(lambda: Lookup(sparse=False)) if model == "sparse" else None  # AdamW takes no sparse gradients
    Twins(build, build_plain=plain, **POLICIES[policy]).train().assert_equal()


@pytest.mark.parametrize(("policy", "way"), in_turn(CHECKPOINTED))
@distributed(world_size=2)
def test_activation_checkpoints_and_hooks_of_saved_tensors_equal_one_process_without(way, policy):
    twins = Twins(lambda: Stack(way=way), build_plain=Stack, **POLICIES[policy])
    twins.train().assert_equal()


@PLACED
@pytest.mark.parametrize("way", ["plain", "reentrant", "non-reentrant", "whole, non-reentrant"])
@distributed(world_size=2)
def test_frozen_weights_do_not_pile_up(way, policy):
    """Nothing is reduced that would make them go: what a block's backward used has to be evicted for the next one's."""
    twins = Twins(lambda: AdaptedStack(way), build_plain=lambda: AdaptedStack("plain"), **POLICIES[policy])
    seen, pool = [], twins.model.manager.pool
    for block in twins.raw.blocks:
        block.base.register_forward_hook(lambda *_: seen.append(pool.bytes_in_use))
        block.register_full_backward_hook(lambda *_: seen.append(pool.bytes_in_use))
    twins.train().assert_equal()
    sizes = [chunk.layout.num_bytes for chunk in twins.model.manager.chunks]
    num_hooks = 2 if way == "plain" else 3  # forward, again, and backward
    assert len(seen) == 4 * num_hooks * len(twins.raw.blocks)
    # What runs, what arrives, what comes next, and a chunk of gradients that waits for those of other blocks.
    assert max(seen) <= (3 + POLICIES[policy].get("max_prefetch", 0)) * max(sizes) < sum(sizes) / 4


def _llama(gradient_checkpointing: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=False,
        )
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def _train_llama(model, x, backward, rank, step):
    tokens = (x.abs() * 16).long().clamp(max=31)
    backward(model(input_ids=tokens, labels=tokens).loss)


@PLACED
@distributed(world_size=2)
def test_gradient_checkpointing_of_transformers(policy):
    twins = Twins(
        lambda: _llama(True),
        _train_llama,
        build_plain=lambda: _llama(False),
        **POLICIES[policy] | {"chunk_config_dict": {"chunk_size": 512}},
    )
    twins.train().assert_equal()


def _spectral_norm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block())


def _old_weight_norm() -> nn.Module:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # use the new one, it says
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block())


def _old_spectral_norm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block())


@PLACED
@pytest.mark.parametrize("build", [_spectral_norm, _old_weight_norm, _old_spectral_norm])
@distributed(world_size=2)
def test_weights_that_are_computed_from_others(build, policy):
    Twins(build, at_once=True, **POLICIES[policy]).train().assert_equal()


def _of_dataclass(model, x, backward, rank, step):
    result = model(x)
    backward(square_loss(result.logits) + result.hidden.square().mean())


@PLACED
@distributed(world_size=2)
def test_dataclass_outputs(policy):
    Twins(seeded(DataclassOutput), _of_dataclass, **POLICIES[policy]).train().assert_equal()


@distributed(world_size=2)
def test_a_model_without_trained_parameters_computes():
    booster = Booster(plugin=GeminiPlugin(precision="fp32", chunk_config_dict=CHUNK))
    plain, raw = Stack().to(current_device()), Stack().requires_grad_(False)
    model, *_ = booster.boost(raw)
    x = torch.ones(2, WIDTH, device=current_device()).requires_grad_()
    for _ in range(2):
        expected, found = plain(x), model(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


class _Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, WIDTH, max_norm=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(tokens_of(x))


@distributed(world_size=2)
def test_complex_views_of_weights_and_sparse_tensors_are_saved_for_backward():
    class Spectral(nn.Module):
        """A filter in the frequencies, as of GFNet, with a conjugated weight, and a sparse product, as of a GCN."""

        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))
            self.phase = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            frequencies = torch.fft.rfft(x) * torch.view_as_complex(self.filter) * self.phase.conj()
            mixed = torch.fft.irfft(frequencies, n=WIDTH)
            return self.last(torch.sparse.mm(torch.eye(x.shape[0], device=x.device).to_sparse(), mixed))

    class Stacked(nn.Sequential):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(nn.Linear(WIDTH, WIDTH), Spectral(), Spectral())

    # torch's Adam refuses conjugated gradients.
    twins = Twins(Stacked, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    twins.train()
    twins.assert_equal()


@distributed(world_size=2)
def test_a_module_that_writes_to_its_weights_is_an_error():
    twins = Twins(_Renormalised)
    with pytest.raises(ConfigError, match=r"forward of Embedding wrote to its weights \('rows.weight'\)"):
        twins.model(twins.batch(0))


def _compiled_blocks(model: Stack) -> nn.Module:
    model.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in model.blocks)
    return model


def _compiled_in_place(model: Stack) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


COMPILED = {
    "the model": lambda model: torch.compile(model, backend="aot_eager"),
    "its blocks": _compiled_blocks,
    "its blocks in place": _compiled_in_place,
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [pytest.param("static", marks=pytest.mark.slow), "prefetch"])
@pytest.mark.parametrize("what", COMPILED)
@distributed(world_size=2, timeout=120, device="cpu")  # what is compiled does not run on the simulated device
def test_what_was_compiled_before_boost_trains_in_parts_between_the_modules(what, policy):
    """Gathering breaks graphs, and what lies between is compiled once."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    twins = Twins(lambda: COMPILED[what](Stack(2)), build_plain=lambda: Stack(2), **POLICIES[policy])
    twins.train(range(2))
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    twins.train(range(2, 5))
    assert 0 < num_graphs == torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with twins.model.gathered():
        found = [parameter.detach().clone() for parameter in twins.raw.parameters()]
    torch.testing.assert_close(found, list(twins.plain.parameters()), rtol=2e-5, atol=4e-6)
