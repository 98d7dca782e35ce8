"""Models without values under TorchFSDPPlugin: filled unit by unit, alike on any number of ranks, and they train."""

from __future__ import annotations

import pytest
import torch
from harness import distributed, run_ranks
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster, FP16NaiveMixedPrecision, LazyInitContext
from booster.device import current_device
from booster.plugins import TorchFSDPPlugin

pytestmark = pytest.mark.on_device

LLAMA = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=37,
    tie_word_embeddings=True,
)


def trained(make, **arguments):
    """The weights that the model begins with, and those after a step."""
    torch.manual_seed(5)
    raw = make()
    booster = Booster(plugin=TorchFSDPPlugin(**arguments))
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=0.01))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.arange(12, device=booster.device).view(2, 6)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    return before, model.state_dict()


def on_meta():
    with torch.device("meta"):
        return LlamaForCausalLM(LLAMA)


def lazily():
    with LazyInitContext(eager_below_bytes=0):
        return LlamaForCausalLM(LLAMA)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_meta_model_begins_alike_on_any_number_of_ranks(strategy):
    worlds = [run_ranks(trained, size, on_meta, sharding_strategy=strategy)[0] for size in (1, 2, 3)]
    for before, after in worlds[1:]:
        for name, tensor in worlds[0][0].items():
            assert torch.equal(before[name], tensor), name
            torch.testing.assert_close(after[name], worlds[0][1][name], rtol=1e-5, atol=1e-6)
    before = worlds[0][0]
    matrices = [tensor for name, tensor in before.items() if tensor.dim() == 2 and "embed" not in name]
    assert all(0.01 < float(tensor.std()) < 0.03 for tensor in matrices)  # transformers' own 0.02
    assert len({tuple(tensor.flatten()[:4].tolist()) for tensor in matrices}) > len(matrices) // 2
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj.weight"])


@distributed(world_size=2)
def test_a_lazy_model_is_the_ordinary_one():
    expected = trained(lambda: LlamaForCausalLM(LLAMA))
    found = trained(lazily)
    for ours, theirs in zip(found, expected, strict=True):
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name


@distributed(world_size=2)
def test_a_lazy_model_in_half_weights():
    torch.manual_seed(5)
    raw = lazily()
    booster = Booster(plugin=TorchFSDPPlugin(), mixed_precision=FP16NaiveMixedPrecision(initial_scale=2**8))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    torch.manual_seed(5)
    expected = LlamaForCausalLM(LLAMA).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name].half()), name
    masters = {part.name: part.parameter.detach() for part in optimizer.shards.parts if part.has_master}
    assert masters
    for part in optimizer.shards.parts:
        found = part.parameter.detach().flatten().cpu()
        assert torch.equal(found, expected[part.name].flatten()[slice(*part.span)])


@distributed(world_size=2)
def test_param_init_fn_fills_what_is_on_meta():
    def fill(module: nn.Module) -> None:
        module.to_empty(device=current_device(), recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    with torch.device("meta"):
        raw = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)))
    booster = Booster(plugin=TorchFSDPPlugin(param_init_fn=fill))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    assert all(bool((tensor == 0.25).all()) for tensor in model.state_dict().values())
    booster.backward(model(torch.ones(1, 3, device=booster.device)).sum(), optimizer)
    optimizer.step()
    assert not any(bool((tensor == 0.25).all()) for tensor in model.state_dict().values())
