"""Stages of models without memory: they begin as an ordinary build does, and no rank ever holds a whole model."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from harness import preload, run_ranks
from oracles.joined_slices import joined_over_ranks
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model

from booster import Booster, LazyInitContext
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device

preload(*TRANSFORMERS_MODULES)

NUM_LAYERS, SIDE = 16, 1024
LAYER_BYTES = SIDE * (SIDE + 1) * 4


def without_memory(kind: str) -> AbstractContextManager:
    return torch.device("meta") if kind == "meta" else LazyInitContext()


def first_weights(name: str, kind: str, arguments: dict):
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", num_microbatches=2, **arguments))
    torch.manual_seed(3)
    with without_memory(kind):
        raw = get_model(name).with_layers(4).construct()
    model, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters()))
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert 0 < len(list(model.parameters())) < len(list(get_model(name).with_layers(4).construct().parameters()))
    return joined_over_ranks(model)


@pytest.mark.parametrize(
    "arguments", [{"pp_size": 2}, {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_lazy_models_begin_as_an_ordinary_build(name, arguments):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = dict(get_model(name).with_layers(4).construct().named_parameters())
    for found in run_ranks(first_weights, 2, name, "lazy", arguments, timeout=60):
        for weight_name, parameter in expected.items():
            assert torch.equal(found[weight_name], parameter.detach()), weight_name


def test_meta_models_begin_alike_in_any_number_of_stages():
    two = run_ranks(first_weights, 2, "llama", "meta", {"pp_size": 2}, timeout=60)[0]
    four = run_ranks(first_weights, 4, "llama", "meta", {"pp_size": 4}, timeout=60)[0]
    shared = run_ranks(first_weights, 4, "llama", "meta", {"pp_size": 2, "tp_size": 2}, timeout=60)[0]
    assert two.keys() == four.keys() == shared.keys()
    for name, weight in two.items():
        assert torch.equal(weight, four[name]), name
        assert torch.equal(weight, shared[name]), name


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def extra_memory_of_boost(kind: str) -> int:
    """Returns the most memory that this process took from before the model was built to after boost."""
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    assert libc.mallopt(mmap_threshold, 256 * 1024)  # what is freed goes back at once
    assert libc.mallopt(trim_threshold, 2**20)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"))
    booster.boost(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))  # what torch imports at its first use
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts at what is resident now
    before = _status_bytes("VmRSS")
    with without_memory(kind):
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(NUM_LAYERS)))
    boosted, *_ = booster.boost(model)
    extra = _status_bytes("VmHWM") - before
    assert sum(parameter.nbytes for parameter in boosted.parameters()) == NUM_LAYERS // 2 * LAYER_BYTES
    return extra


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("kind", ["meta", "lazy"])
def test_boost_needs_a_few_layers_besides_those_of_the_stage(kind):
    for extra in run_ranks(extra_memory_of_boost, 2, kind, timeout=60):
        assert extra < (NUM_LAYERS // 2 + 4) * LAYER_BYTES
