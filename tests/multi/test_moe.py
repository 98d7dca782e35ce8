"""Models with MoE layers train under the plugins as in one process that takes the ranks' batches one after the other.

Each rank routes its own tokens: capacities and load-balancing losses are not those of the global batch.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from parity import (
    Case,
    assert_parallel_equals_serial,
    assert_ranks_equal_serial,
    make_booster,
    train_parallel,
    train_reference,
)
from torch import nn
from zoo import split_batch

from booster.moe import MoeLoss

STRATEGIES = {
    "ddp": ("torch_ddp", {}),
    "zero 1": ("low_level_zero", {"stage": 1}),
    # Weights that reach into the next bucket, and gradients that arrive after their bucket was sent.
    "zero 1, small buckets": ("low_level_zero", {"stage": 1, "reduce_bucket_size_in_m": 0.0005}),
    "zero 2": ("low_level_zero", {"stage": 2}),
    "gemini": ("gemini", {}),
    "fsdp": ("torch_fsdp", {}),
    "hybrid": ("hybrid_parallel", {"tp_size": 1}),
    "hybrid, zero 1": ("hybrid_parallel", {"tp_size": 1, "zero_stage": 1}),
}
MODELS = ("widenet", "widenet_stacked", "widenet_checkpointed", "widenet_reentrant")


def runs():
    """Both kinds of experts under every strategy, and checkpoints by default under some."""
    for model in MODELS:
        for strategy in STRATEGIES:
            is_default = model in MODELS[:2] or strategy in ("ddp", "zero 1, small buckets", "fsdp")
            yield pytest.param(model, strategy, marks=() if is_default else pytest.mark.slow)


@pytest.mark.parametrize(("model", "strategy"), list(runs()))
def test_two_ranks_train_as_one_process_by_parts(model, strategy):
    plugin, arguments = STRATEGIES[strategy]
    # Small enough that every step clips.
    case = Case(plugin=plugin, model=model, steps=3, max_norm=0.1, plugin_arguments=arguments)
    ranks = run_ranks(train_parallel, 2, asdict(case), timeout=120, device=case.device)
    weights = assert_ranks_equal_serial(case, ranks)
    expected = train_reference(case, in_parts=True)
    assert min(expected.norms) > case.max_norm
    torch.testing.assert_close(torch.tensor(ranks[0].losses), torch.tensor(expected.losses), rtol=0, atol=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# FSDP2 adds up the bf16 gradients of a tensor of several blocks in an order that depends on the device: small biases of
# separate experts are then at the bound.
@pytest.mark.parametrize(
    ("model", "strategy", "precision"),
    [
        *itertools.product(MODELS[:2], ["ddp"], ["bf16", "fp16"]),
        *itertools.product(MODELS[:2], ["zero 1"], ["fp16"]),
        *itertools.product(MODELS[:2], ["zero 2", "gemini", "hybrid"], ["bf16"]),
        ("widenet_stacked", "fsdp", "fsdp_bf16"),
    ],
)
def test_low_precision_routes_as_one_process_by_parts(model, strategy, precision):
    plugin, arguments = STRATEGIES[strategy]
    assert_parallel_equals_serial(
        plugin, model, steps=3, max_norm=0.1, precision=precision, optimizer="sgd", plugin_arguments=arguments
    )


def train_with_evaluation(settings, evaluates):
    """Returns the losses of three steps through `boost`, with an evaluation before each of them."""
    case, losses = Case(**settings), []
    booster, entry = make_booster(case, case.entry), case.entry
    raw = entry.build()
    criterion = MoeLoss(0.1, nn.CrossEntropyLoss)
    model, optimizer, criterion, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2), criterion)
    for step in range(3):
        batch = split_batch(entry.make_batch(step, 4), booster.rank, 2)
        x, y = (batch[name].to(booster.device) for name in ("x", "y"))
        if evaluates:
            model.eval()
            with torch.no_grad():
                outputs = model(x)
                assert torch.equal(criterion(outputs, y), F.cross_entropy(outputs, y))
                model(x)  # without a criterion
            model.train()
        outputs = model(x)
        loss = criterion(outputs, y)
        assert loss > F.cross_entropy(outputs.detach(), y)
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "zero 2", "gemini", "fsdp", "hybrid"])
def test_evaluation_changes_no_loss_of_training(strategy):
    plugin, arguments = STRATEGIES[strategy]
    settings = asdict(Case(plugin=plugin, model="widenet", plugin_arguments=arguments))
    found = [run_ranks(train_with_evaluation, 2, settings, evaluates) for evaluates in (True, False)]
    assert found[0] == found[1]
