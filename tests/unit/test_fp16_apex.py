"""Apex's levels and overrides, bit for bit what a plain torch loop does by hand."""

from __future__ import annotations

import torch
from oracles.precision_training import (
    OVERFLOW_STEPS,
    STEPS,
    assert_same_records,
    assert_same_states,
    assert_same_weights,
    batches,
    boost,
    make_net,
    make_optimizer,
    train_autocast,
    train_boosted,
    train_half_by_hand,
)
from torch import nn

from booster.mixed_precision import FP16ApexMixedPrecision


def formats(model):
    return {name: value.dtype for name, value in model.state_dict().items() if value.is_floating_point()}


def test_apex_o0_is_fp32():
    record = train_boosted(FP16ApexMixedPrecision("O0"))[2]
    reference = make_net()
    optimizer, criterion = make_optimizer(reference), nn.CrossEntropyLoss()
    for (batch, target), (loss, _, scale, skipped) in zip(batches(), record, strict=True):
        expected = criterion(reference(batch)["logits"], target)
        expected.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert (loss, scale, skipped) == (expected.item(), None, False)
    assert set(formats(boost(FP16ApexMixedPrecision("O0"), make_net().half())[0]).values()) == {torch.float32}


def test_apex_o1_equals_autocast():
    model, optimizer, record = train_boosted(FP16ApexMixedPrecision("O1", verbosity=0))
    reference, plain, expected = train_autocast(torch.float16, init_scale=2.0**16)
    assert_same_records(record, expected)
    assert_same_weights(model, reference)
    assert_same_states(optimizer.unwrap(), plain)


def test_apex_o2_keeps_batch_norms_and_masters_in_fp32():
    model, optimizer, record = train_boosted(FP16ApexMixedPrecision("O2", max_loss_scale=2.0**10, verbosity=0))
    reference, masters, expected = train_half_by_hand(2.0**10, 2000, hysteresis=1, keeps_norm=True)
    assert_same_records(record, expected)
    for name, dtype in formats(model).items():
        assert dtype == (torch.float32 if name.startswith("norm.") else torch.float16), name
    for name, master in optimizer.checkpoint_state().named_parameters().items():
        assert torch.equal(master, masters[name]), name
    assert_same_weights(model, reference)
    norm = dict(model.named_parameters())["norm.weight"]
    assert any(parameter is norm for group in optimizer.param_groups for parameter in group["params"])


def test_apex_o3_is_all_float16_without_masters():
    model, optimizer, criterion = boost(
        FP16ApexMixedPrecision("O3"), net := make_net(), make_optimizer(net), nn.CrossEntropyLoss()
    )
    assert set(formats(model).values()) == {torch.float16}
    assert optimizer.loss_scaler is None
    assert optimizer.master_weights is None
    reference = make_net().half()
    plain = make_optimizer(reference)
    batch, target = next(batches())
    optimizer.backward(criterion(model(batch)["logits"], target))
    criterion(reference({"x": batch["x"].half(), "index": None})["logits"].float(), target).backward()
    optimizer.step()
    plain.step()
    assert_same_weights(model, reference)


def test_apex_overrides():
    o2 = FP16ApexMixedPrecision("O2", keep_batchnorm_fp32="False", master_weights=False, loss_scale="128")
    model, optimizer, _ = boost(o2, net := make_net(), make_optimizer(net))
    assert set(formats(model).values()) == {torch.float16}
    assert optimizer.master_weights is None
    assert optimizer.loss_scaler.scale == 128
    o3 = FP16ApexMixedPrecision("O3", keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic")
    model, optimizer, _ = boost(o3, net := make_net(), make_optimizer(net))
    assert formats(model)["norm.weight"] == torch.float32
    assert len(optimizer.master_weights) == len([p for p in net.parameters() if p.requires_grad]) - 2
    assert optimizer.loss_scaler.scale == 2.0**16
    low = FP16ApexMixedPrecision("O1", min_loss_scale=2.0**18, cast_model_outputs=torch.bfloat16, verbosity=0)
    model, optimizer, _ = boost(low, net := make_net(), make_optimizer(net))
    assert optimizer.loss_scaler.scale == 2.0**18
    assert model(next(batches())[0])["logits"].dtype == torch.bfloat16


def test_apex_bfloat16_and_no_cast():
    model, optimizer, _ = boost(
        FP16ApexMixedPrecision("O2", cast_model_type=torch.bfloat16), net := make_net(), make_optimizer(net)
    )
    assert formats(model)["first.weight"] == torch.bfloat16
    half = nn.Linear(3, 3).half()
    _, optimizer, _ = boost(FP16ApexMixedPrecision("O2", cast_model_type=False), half, make_optimizer(half))
    assert len(optimizer.master_weights) == 2, "weights that came in float16 get masters too"


def test_apex_logs_skipped_steps(capsys):
    model, optimizer, _ = boost(
        FP16ApexMixedPrecision("O2", loss_scale="dynamic"), net := make_net(), make_optimizer(net)
    )
    optimizer.backward(model(next(batches())[0])["logits"].sum() * torch.inf)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert "loss scale 65536 -> 32768" in capsys.readouterr().err


def test_constant_scale_skips_overflows_and_unscales():
    precision = FP16ApexMixedPrecision("O2", loss_scale=2.0**10)
    record = train_boosted(precision)[2]
    assert [skipped for *_, skipped in record] == [step in OVERFLOW_STEPS for step in range(STEPS)]
    assert {scale for _, _, scale, _ in record} == {2.0**10}
