"""Models built in a `LazyInitContext` under plugins: they train as if they had been built as always."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import nn

from booster import Booster, LazyInitContext
from booster.lazy_init import is_lazy
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin

pytestmark = pytest.mark.on_device

SEED = 77
WORDS, WIDTH = 30, 12
STATIC, CPU = {}, {"placement_policy": "cpu"}


class Net(nn.Module):
    """A tied head, a frozen layer, buffers of both kinds, and initialisations that draw in several ways."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.register_buffer("scales", torch.rand(WIDTH))
        self.register_buffer("hidden", torch.linspace(0, 1, WIDTH) * torch.randn(WIDTH), persistent=False)
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.3, a=-0.5, b=0.5)
            nn.init.orthogonal_(layer.weight.data[: WIDTH // 2])

    def forward(self, x):
        x = self.words(x) + self.hidden
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scales
        return self.head(self.frozen(self.norm(x)))


def _plugin(name, precision, arguments):
    if name == "gemini":
        return GeminiPlugin(precision=precision, chunk_config_dict={"chunk_size": 200}, **arguments)
    if name == "low_level_zero":
        return LowLevelZeroPlugin(precision=precision, **arguments)
    return TorchDDPPlugin(**arguments)


def _boosted(is_built_lazily, seed, name="gemini", precision="fp32", arguments=STATIC):
    """Returns a booster, the model and its optimizer, made before boost. Collective."""
    booster = Booster(plugin=_plugin(name, precision, arguments))
    torch.manual_seed(seed)
    with LazyInitContext(eager_below_bytes=0) if is_built_lazily else contextlib.nullcontext():
        model = Net()
    assert all(is_lazy(tensor) == is_built_lazily for tensor in (*model.parameters(), model.scales, model.hidden))
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(groups, lr=0.01))
    assert not any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))
    return booster, boosted, optimizer


def _state(boosted):
    hidden = {name: buffer for name, buffer in boosted.named_buffers() if name.endswith("hidden")}
    assert len(hidden) == 1
    return {name: tensor.detach().clone() for name, tensor in (boosted.state_dict() | hidden).items()}


def _train(booster, boosted, optimizer, steps=3):
    """Returns the losses of this rank. Collective."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + booster.plugin.dp_rank)
        batch = torch.randint(WORDS, (7,), generator=generator).to(booster.device)
        loss = nn.functional.cross_entropy(boosted(batch).float(), batch)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _both_ways(cases):
    """Trains every case with a model built as always and with a lazy one, whose seeds differ but for rank 0's."""
    for name, precision, arguments in cases:
        runs = []
        for is_built_lazily in (False, True):
            booster = None
            seed = SEED + torch.distributed.get_rank() * is_built_lazily
            booster, boosted, optimizer = _boosted(is_built_lazily, seed, name, precision, arguments)
            initial = _state(boosted)
            losses = _train(booster, boosted, optimizer)
            runs.append({"losses": losses, "initial": initial, "trained": _state(boosted)})
        _assert_same_bits(*runs)
        assert not torch.equal(runs[0]["initial"]["words.weight"], runs[0]["trained"]["words.weight"])


def _assert_same_bits(found, expected):
    if isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        return
    assert list(found) == list(expected)
    for name in found:
        _assert_same_bits(found[name], expected[name])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("arguments", [STATIC, CPU], ids=["static", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_lazy_model_trains_bit_for_bit_as_an_ordinary_one(precision, arguments, world_size):
    run_ranks(_both_ways, world_size, [("gemini", precision, arguments)], timeout=60)


def test_other_plugins_fill_a_lazy_model():
    cases = [
        ("low_level_zero", "fp32", {"stage": 1}),
        ("low_level_zero", "bf16", {"stage": 2}),
        ("torch_ddp", None, {}),
    ]
    run_ranks(_both_ways, 2, cases, timeout=60)


def test_a_booster_without_plugin_fills_a_lazy_model():
    models = []
    for context in (contextlib.nullcontext(), LazyInitContext(eager_below_bytes=0)):
        torch.manual_seed(SEED)
        with context:
            model = Net()
        Booster(device="cpu").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        models.append(model.state_dict())
    _assert_same_bits(*models)


def _load_into_lazy(folder, writer):
    booster, boosted, optimizer = _boosted(False, SEED, writer)
    _train(booster, boosted, optimizer, steps=1)
    booster.save_model(boosted, folder, shard=True)
    wanted = _state(boosted)
    booster, boosted, optimizer = _boosted(True, SEED + 1)
    booster.load_model(boosted, folder)
    found = _state(boosted)
    del wanted["hidden"], found["hidden"]  # no checkpoint has it
    _assert_same_bits(found, wanted)
    assert torch.isfinite(_train(booster, boosted, optimizer)).all()


@pytest.mark.parametrize("writer", ["torch_ddp", "low_level_zero"])
def test_a_checkpoint_of_another_plugin_loads_into_a_lazy_model(writer, tmp_path):
    run_ranks(_load_into_lazy, 2, tmp_path / "checkpoint", writer, timeout=60)


# Memory, as the kernel counts it.

SIDE, NUM_LAYERS = 1024, 24
CHUNK_BYTES = SIDE * (SIDE + 1) * 4


def _status_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _most_memory():
    """Returns the most since the mark was reset, without the pages of files, which the kernel takes and brings back."""
    return _status_bytes("VmHWM") - _status_bytes("RssFile") - _status_bytes("RssShmem")


def _built_lazily(num_layers):
    with LazyInitContext():
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(num_layers)))
        for layer in model:
            nn.init.trunc_normal_(layer.weight, std=0.02)
    return model


def _extra_memory_of_boost():
    """Returns the most memory that this process took from before the model was built to after boost."""
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    assert libc.mallopt(mmap_threshold, 256 * 1024)  # what is freed goes back at once
    assert libc.mallopt(trim_threshold, 2**20)
    booster = Booster(plugin=GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": SIDE * (SIDE + 1)}))
    _built_lazily(num_layers=2)  # what torch imports, and the kernel reads of it from disk, at the first use
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts at what is resident now
    before = _status_bytes("RssAnon")
    model = _built_lazily(NUM_LAYERS)
    built = _most_memory() - before
    boosted, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    return built, _most_memory() - before, len(list(boosted.parameters()))


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_boost_needs_a_few_chunks_besides_the_parts_that_stay():
    # In new processes: in others, pages that the trim gave back return with each small allocation.
    for built, boosted, _ in run_ranks(_extra_memory_of_boost, 2, timeout=60, fresh=True):
        assert built < 4 * CHUNK_BYTES
        assert boosted < (NUM_LAYERS // 2 + 5) * CHUNK_BYTES
