"""HybridParallelPlugin on GPUs: every axis trains as plain torch. Run by benchmarks/gpu_suite.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_groups import group_of_devices, needs_gpu, needs_two
from harness import distributed
from torch import nn

from booster import Booster
from booster.device import current_device, device_type
from booster.plugins import HybridParallelPlugin

pytestmark = [pytest.mark.gpu, pytest.mark.on_device, needs_gpu]

VOCABULARY, WIDTH, HEADS, TOKENS, SAMPLES, STEPS = 99, 64, 4, 16, 8, 5
LOSS_SCALE = 2.0**10  # low enough that no step overflows
TIMEOUT = 300.0  # nccl takes seconds to begin
# The losses of a few steps: fp32 sums in another order, bf16 rounds by 2**-9 and fp16 by 2**-12 per operation.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
PLAN = {
    "embedding": "vocab",
    "layers.*.query": "colwise",
    "layers.*.key": "colwise",
    "layers.*.value": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "vocab_head",
}


class Layer(nn.Module):
    """A transformer layer; its heads are of fixed width, so that any number of them fits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm, self.norm_after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        heads = [one(normed).unflatten(-1, (-1, WIDTH // HEADS)) for one in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in heads), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_after(x))))


class Language(nn.Module):
    """A small language model."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(num_layers: int = 2) -> Language:
    torch.manual_seed(0)
    return Language(num_layers)


def batch(step: int) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(step))
    return ids.to(current_device())


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), ids[:, 1:].reshape(-1))


def plain_losses(precision: str, num_layers: int = 2) -> list[float]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    model = build(num_layers).to(current_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for step in range(STEPS):
        with torch.autocast(device_type(), dtype, enabled=dtype is not None):
            loss = loss_of(model(batch(step)), batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def boosted_losses(precision: str, **arguments: Any) -> list[float]:
    settings = {"initial_scale": LOSS_SCALE} if precision == "fp16" else {}
    plugin = HybridParallelPlugin(precision=precision, plan=PLAN, max_norm=0.5, **settings, **arguments)
    booster = Booster(plugin=plugin)
    raw = build()
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-3, eps=1e-5))
    losses = []
    for step in range(STEPS):
        own = batch(step).chunk(plugin.dp_size)[plugin.dp_rank]
        loss = loss_of(model(own), own)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def staged_losses(precision: str, num_layers: int, **arguments: Any) -> list[float]:
    settings = {"initial_scale": LOSS_SCALE} if precision == "fp16" else {}
    plugin = HybridParallelPlugin(precision=precision, max_norm=0.5, num_microbatches=4, **settings, **arguments)
    booster = Booster(plugin=plugin)
    raw = build(num_layers)
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-3, eps=1e-5))
    losses = []
    for step in range(STEPS):
        result = booster.execute_pipeline(iter([batch(step)]), model, loss_of, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result["loss"]))
    return losses


def assert_trains_as_plain_torch(precision: str, **arguments: Any) -> None:
    expected = plain_losses(precision)
    found = boosted_losses(precision, **arguments)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=TOLERANCES[precision], atol=0.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_one_device(precision: str, zero_stage: int) -> None:
    assert_trains_as_plain_torch(precision, zero_stage=zero_stage)


@pytest.mark.usefixtures("alone")
def test_one_device_with_checkpointed_layers() -> None:
    assert_trains_as_plain_torch("fp32", gradient_checkpoint_config=True)


@needs_two
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("mode", [None, "split_gather", "ring"])
@distributed(2, fresh=True, timeout=TIMEOUT)
def test_tensor_parallel(mode: str | None, precision: str, tmp_path: Path) -> None:
    with group_of_devices(tmp_path):
        sequence = {"enable_sequence_parallelism": mode is not None, "sequence_parallelism_mode": mode}
        assert_trains_as_plain_torch(precision, tp_size=2, **sequence)


@needs_two
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@distributed(2, fresh=True, timeout=TIMEOUT)
def test_sequence_parallel(mode: str, precision: str, tmp_path: Path) -> None:
    with group_of_devices(tmp_path):
        sequence = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode, "sp_size": 2}
        assert_trains_as_plain_torch(precision, zero_stage=1, **sequence)


@needs_two
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(("style", "num_chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zbv", 2)])
@distributed(2, fresh=True, timeout=TIMEOUT)
def test_pipeline_parallel(style: str, num_chunks: int, precision: str, tmp_path: Path) -> None:
    with group_of_devices(tmp_path):
        expected = plain_losses(precision, num_layers=4)
        found = staged_losses(precision, num_layers=4, pp_size=2, pp_style=style, num_model_chunks=num_chunks)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=TOLERANCES[precision], atol=0.0)
