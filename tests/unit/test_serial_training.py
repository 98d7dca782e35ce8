"""The serial reference: a batch taken in the parts of ranks is the batch, and a nudge is below one unit."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from oracles import serial_training
from oracles.run_distances import beyond, bounds, distances
from oracles.serial_training import Fp32Sums, nudge_weights, train_serial
from parity import AT_ONCE, EXACT, KIND
from zoo import get_model, model_names, needs_transformers

FAST = ("mlp_odd", "tied_lm", "routed_experts")


def train(entry, precision, parts, fp32_sums="none", steps=5):
    return train_serial(
        entry,
        precision=precision,
        steps=steps,
        batch_size=12,
        accumulation=2,
        parts=parts,
        max_norm=0.5,
        optimizer="adamw",
        fp32_sums=fp32_sums,
    )


def marked(name):
    """A model as a parameter; most in `make test-all` only."""
    marks = [] if name in model_names(transformers=False) else [needs_transformers]
    return pytest.param(name, marks=marks if name in FAST else [*marks, pytest.mark.slow])


# Of which the loss of a batch is the mean over its parts.
DIVISIBLE = [marked(name) for name in model_names() if not get_model(name).mixes_samples]


@pytest.mark.parametrize("name", DIVISIBLE)
def test_the_parts_are_the_whole_batch(name, monkeypatch):
    # The loop for half weights too, whose roundings in fp32 are those of fp32.
    monkeypatch.setitem(serial_training.HALF, "fp16_naive", torch.float32)
    entry = get_model(name)
    initial, whole = entry.build().state_dict(), train(entry, None, parts=1, steps=2)
    allowed = bounds(whole, initial, EXACT)
    runs = {parts: train(entry, None, parts, steps=2) for parts in (2, 3)}
    runs |= {sums: train(entry, "fp16_naive", 3, sums, steps=2) for sums in get_args(Fp32Sums)}
    for kind, run in runs.items():
        assert not beyond(distances(run, whole), allowed), kind


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "fp16_naive", "fp16_apex_o2", "bf16_weights"])
@pytest.mark.parametrize("name", FAST)
def test_in_low_precision_parts_differ_from_the_whole_by_their_roundings(name, precision):
    entry = get_model(name)
    whole, parts = train(entry, precision, parts=1), train(entry, precision, parts=2)
    allowed = bounds(whole, entry.build().state_dict(), AT_ONCE[KIND.get(precision, precision)])
    assert not beyond(distances(parts, whole), allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_nudge_changes_weights_by_less_than_one_unit_in_the_last_place(dtype):
    before, after, again = (get_model("tied_lm").build() for _ in range(3))
    nudge_weights(after, 3, dtype)
    nudge_weights(again, 3, dtype)
    num_changed = 0
    for old, new, same in zip(before.parameters(), after.parameters(), again.parameters(), strict=True):
        assert torch.equal(new, same)
        unit = torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(old.abs().double()))
        assert bool(((new.double() - old.double()).abs() <= unit).all() if old.any() else torch.equal(old, new))
        num_changed += int((old != new).sum())
    assert num_changed > 1000


def test_nudges_of_other_seeds_are_other_runs():
    entry = get_model("tied_lm")
    runs = [
        train_serial(
            entry,
            precision="bf16",
            steps=1,
            batch_size=4,
            accumulation=1,
            parts=1,
            max_norm=1.0,
            optimizer="sgd",
            nudge=seed,
            nudge_dtype=torch.bfloat16,
        )
        for seed in (None, 0, 1)
    ]
    assert len({run.losses[0] for run in runs}) == 3
