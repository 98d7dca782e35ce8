"""Cross-entropy in chunks of tokens: under every plugin the training of the plain model in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from oracles.joined_slices import joined_over_ranks
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model, split_batch

from booster import Booster, chunked_cross_entropy
from booster.device import current_device
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device
preload(*TRANSFORMERS_MODULES)

STEPS, CHUNK = 3, 5
# Untied, tied, with a soft cap of the logits and scaled embeddings, a masked language model with a bias.
MODELS = ["llama", "gpt2", "gemma", "bert_pretraining"]


def hybrid(precision, **arguments):
    return HybridParallelPlugin(precision=precision, zero_bucket_size_in_m=0.004, **arguments)


def sequence(precision, mode, **arguments):
    return hybrid(precision, enable_sequence_parallelism=True, sequence_parallelism_mode=mode, **arguments)


GEMINI = {"min_chunk_size_m": 1e-3, "search_range_m": 1e-3}
PLUGINS = {
    "ddp": (2, lambda precision: TorchDDPPlugin()),
    "ddp unused": (2, lambda precision: TorchDDPPlugin(find_unused_parameters=True)),
    "zero 1": (2, lambda precision: LowLevelZeroPlugin(stage=1, precision=precision)),
    "zero 2": (2, lambda precision: LowLevelZeroPlugin(stage=2, precision=precision)),
    "gemini": (2, lambda precision: GeminiPlugin(precision=precision, **GEMINI)),
    "gemini offload": (2, lambda precision: GeminiPlugin(precision=precision, placement_policy="cpu", **GEMINI)),
    "fsdp": (2, lambda precision: TorchFSDPPlugin()),
    "hybrid": (2, lambda precision: hybrid(precision, zero_stage=1)),
    "tp 2": (2, lambda precision: hybrid(precision, tp_size=2)),
    "tp 2 gathered": (2, lambda precision: hybrid(precision, tp_size=2, parallel_output=False)),
    "pp 2": (2, lambda precision: hybrid(precision, pp_size=2, num_microbatches=2)),
    "pp 2 zbv": (
        2,
        lambda precision: hybrid(precision, pp_size=2, num_microbatches=2, pp_style="zbv", num_model_chunks=2),
    ),
    "tp 2 pp 2": (4, lambda precision: hybrid(precision, tp_size=2, pp_size=2, num_microbatches=2)),
    "split_gather": (2, lambda precision: sequence(precision, "split_gather", tp_size=2)),
    "all_to_all": (2, lambda precision: sequence(precision, "all_to_all", sp_size=2)),
    "recomputed": (2, lambda precision: hybrid(precision, gradient_checkpoint_config=True)),
}
CASES = [(model, plugin) for model in MODELS for plugin in PLUGINS if model == "llama" or plugin != "pp 2 zbv"]


def build(model: str) -> nn.Module:
    return get_model(model, 4 if model == "llama" else None).build()


def train(model: str, plugin: str, precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    entry = get_model(model)
    booster = Booster(plugin=PLUGINS[plugin][1](precision))
    raw = chunked_cross_entropy(build(model), CHUNK)
    boosted, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2, eps=1e-3))
    rank, size = getattr(booster.plugin, "dp_rank", dist.get_rank()), getattr(booster.plugin, "dp_size", 2)
    losses = []
    for step in range(STEPS):
        batch = split_batch(entry.make_batch(step, 4), rank, size)
        batch = {key: value.to(current_device()) for key, value in batch.items()}
        result = booster.execute_pipeline(iter([batch]), boosted, lambda outputs, _: outputs.loss, optimizer)
        losses.append(result["loss"].item())
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, joined_over_ranks(boosted)


def train_alone(model: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains the plain model, whose logits are whole."""
    entry, plain = get_model(model), build(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        loss = plain(**entry.make_batch(step, 4)).loss
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, plain.state_dict()


@pytest.mark.parametrize(("model", "plugin"), CASES)
def test_training_is_that_of_the_plain_model(model, plugin):
    expected_losses, expected = train_alone(model)
    found = run_ranks(train, PLUGINS[plugin][0], model, plugin, "fp32", timeout=120)
    for step, one in enumerate(expected_losses):
        mean = sum(losses[step] for losses, _ in found) / len(found)
        assert mean == pytest.approx(one, rel=2e-6)
    for key, weight in found[0][1].items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-5)


def step_of(plugin: str, precision: str, is_chunked: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss and the change of the weights in one step of SGD."""
    entry, booster = get_model("llama"), Booster(plugin=PLUGINS[plugin][1](precision))
    raw = get_model("llama").build()
    before = {key: value.clone() for key, value in raw.state_dict().items()}
    raw = chunked_cross_entropy(raw, CHUNK) if is_chunked else raw
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=1.0))
    batch = split_batch(entry.make_batch(0, 4), booster.plugin.dp_rank, booster.plugin.dp_size)
    batch = {key: value.to(current_device()) for key, value in batch.items()}
    result = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
    optimizer.step()
    return result["loss"].item(), {key: value.float() - before[key] for key, value in joined_over_ranks(model).items()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plugin", ["zero 1", "gemini", "tp 2", "pp 2"])
def test_low_precision_differs_by_roundings_of_the_sums(plugin, precision):
    (whole_loss, whole), (loss, found) = (
        run_ranks(step_of, 2, plugin, precision, is_chunked)[0] for is_chunked in (False, True)
    )
    bound = {"bf16": 2e-2, "fp16": 3e-3}[precision]
    assert loss == pytest.approx(whole_loss, rel=bound)
    for key, change in whole.items():
        assert (found[key] - change).norm() <= bound * change.norm() + 1e-8, key


def train_with_criterion(plugin: str) -> list[float]:
    booster, entry = Booster(plugin=PLUGINS[plugin][1]("fp32")), get_model("llama")
    raw = chunked_cross_entropy(entry.build(), CHUNK)
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2, eps=1e-3))
    losses = []
    for step in range(STEPS):
        batch = split_batch(entry.make_batch(step, 4), booster.plugin.dp_rank, booster.plugin.dp_size)
        tokens = batch["input_ids"].to(current_device())
        logits = model(tokens).logits / 2
        loss = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1), label_smoothing=0.1
        )
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "plugin", [name for name in PLUGINS if name not in ("split_gather", "all_to_all") and "pp" not in name]
)
def test_a_criterion_outside_of_the_model(plugin):
    entry = get_model("llama")
    plain, expected = entry.build(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    for step in range(STEPS):
        tokens = entry.make_batch(step, 4)["input_ids"]
        logits = plain(tokens).logits / 2
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = run_ranks(train_with_criterion, PLUGINS[plugin][0], plugin, timeout=120)
    for step, one in enumerate(expected):
        assert sum(losses[step] for losses in found) / len(found) == pytest.approx(one, rel=2e-6)
