"""Models without memory under HybridParallelPlugin: filled part by part, and from pretrained files."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from harness import preload, run_ranks
from oracles.joined_slices import joined_over_ranks
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model

from booster import Booster, LazyInitContext
from booster.device import current_device
from booster.plugins import HybridParallelPlugin
from booster.pytree import map_tensors

pytestmark = pytest.mark.on_device

preload(*TRANSFORMERS_MODULES)
STEPS = 2


def without_memory(kind: str) -> AbstractContextManager:
    return torch.device("meta") if kind == "meta" else LazyInitContext()


def losses_of(model, entry, backward, step):
    losses = []
    for index in range(STEPS):
        batch = map_tensors(lambda tensor: tensor.to(current_device()), entry.make_batch(index, 4))
        loss = entry.loss(model, batch)
        backward(loss)
        step()
        losses.append(float(loss.detach()))
    return losses


def boosted(name, kind, arguments):
    entry = get_model(name)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **arguments))
    torch.manual_seed(3)
    with without_memory(kind):
        raw = entry.construct()
    return booster, raw, *booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2))[:2]


def train_pretrained(name, kind, directory, arguments):
    entry = get_model(name)
    booster, _, model, optimizer = boosted(name, kind, arguments)
    booster.load_model(model, directory)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return losses_of(model, entry, lambda loss: booster.backward(loss, optimizer), step)


@pytest.mark.parametrize("arguments", [{"tp_size": 2}, {"tp_size": 2, "zero_stage": 1}], ids=str)
@pytest.mark.parametrize("kind", ["meta", "lazy"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_pretrained_files_fill_a_model_without_memory(tmp_path, name, kind, arguments):
    entry = get_model(name)
    raw = entry.build()
    raw.save_pretrained(tmp_path)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    expected = losses_of(raw, entry, torch.Tensor.backward, step)
    world_size = 2 if arguments == {"tp_size": 2} else 4
    for found in run_ranks(train_pretrained, world_size, name, kind, str(tmp_path), arguments, timeout=120):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)


def first_weights(name, kind, arguments):
    _, raw, model, _ = boosted(name, kind, arguments)
    assert not any(parameter.is_meta for parameter in raw.parameters())
    return joined_over_ranks(model)


def test_lazy_models_begin_as_an_ordinary_build():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = dict(get_model("llama").construct().named_parameters())
    for found in run_ranks(first_weights, 2, "llama", "lazy", {"tp_size": 2}, timeout=60):
        for name, parameter in expected.items():
            assert torch.equal(found[name], parameter.detach()), name


def test_meta_models_begin_alike_on_any_number_of_ranks():
    two = run_ranks(first_weights, 2, "llama", "meta", {"tp_size": 2}, timeout=60)[0]
    four = run_ranks(first_weights, 4, "llama", "meta", {"tp_size": 4}, timeout=60)[0]
    assert two.keys() == four.keys()
    for name, weight in two.items():
        assert torch.equal(weight, four[name]), name


def explained(name):
    with torch.device("meta"):
        model = get_model(name).construct()
    before = [tuple(parameter.shape) for parameter in model.parameters()]
    table = HybridParallelPlugin(tp_size=2, precision="fp32").explain(model)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == before
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_meta for parameter in model.parameters())
    return table


def test_a_model_without_memory_is_explained():
    table = run_ranks(explained, 2, "llama", timeout=60)[0]
    assert "model.layers.*.self_attn.q_proj.weight (2)" in table
    assert "colwise" in table
    assert "16x32 of 32x32" in table
