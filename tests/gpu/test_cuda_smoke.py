"""On a GPU: training as in plain torch, every precision, float8 instructions. Run by benchmarks/gpu_suite.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gpu_groups import needs_gpu
from torch import nn

from booster import Booster, FP8MixedPrecision, FP16ApexMixedPrecision, FP16NaiveMixedPrecision, MixedPrecision
from booster.kernels.float8 import (
    FORWARD_DTYPE,
    GRADIENT_DTYPE,
    native_problem,
    quantize,
    scaled_matmul,
    scaled_matmul_reference,
)
from booster.plugins import LowLevelZeroPlugin, TorchDDPPlugin

pytestmark = [pytest.mark.gpu, pytest.mark.on_device, needs_gpu]

WIDTH = 64
LOSS_SCALE = 2.0**10  # low enough that no step overflows

PRECISIONS: dict[str, Callable[[], str | MixedPrecision]] = {
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=LOSS_SCALE),
    "fp16_apex O1": lambda: FP16ApexMixedPrecision(opt_level="O1", loss_scale=LOSS_SCALE),
    "fp16_apex O2": lambda: FP16ApexMixedPrecision(opt_level="O2", loss_scale=LOSS_SCALE),
    "fp8": lambda: "fp8",
    "fp8 rowwise": lambda: FP8MixedPrecision(recipe="rowwise"),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*hidden).to("cuda")


def make_batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    x, y = (torch.randn(32, WIDTH, generator=generator).to("cuda") for _ in range(2))
    return x, y


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_plain(steps: int) -> tuple[list[float], nn.Module]:
    model = make_model()
    optimizer, losses = make_optimizer(model), []
    for index in range(steps):
        x, y = make_batch(index)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def train_boosted(booster: Booster, steps: int) -> tuple[list[float], nn.Module]:
    model = make_model()
    model, optimizer, criterion, _, _ = booster.boost(model, make_optimizer(model), nn.functional.mse_loss)
    losses = []
    for index in range(steps):
        x, y = make_batch(index)
        loss = criterion(model(x), y)
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, booster.unwrap_model(model)


def assert_same_weights(model: nn.Module, reference: nn.Module) -> None:
    for (name, value), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(value, expected), name


def test_single_device_is_plain_torch() -> None:
    losses, model = train_boosted(Booster(), 5)
    expected, reference = train_plain(5)
    assert next(model.parameters()).device.type == "cuda"
    assert losses == expected
    assert_same_weights(model, reference)


@pytest.mark.usefixtures("alone")
def test_ddp_over_nccl_is_plain_torch() -> None:
    losses, model = train_boosted(Booster(plugin=TorchDDPPlugin()), 5)
    expected, reference = train_plain(5)
    assert dist.get_backend() == "nccl"
    assert losses == expected
    assert_same_weights(model, reference)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sharded_optimizer_is_near_plain_torch(stage: int, precision: str, cpu_offload: bool) -> None:
    plugin = LowLevelZeroPlugin(stage, precision, initial_scale=LOSS_SCALE, cpu_offload=cpu_offload)
    losses, model = train_boosted(Booster(plugin=plugin), 5)
    expected, _ = train_plain(5)
    assert all(parameter.device.type == "cuda" for parameter in model.parameters())
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.01)


@pytest.mark.parametrize("name", sorted(PRECISIONS))
def test_precision_is_near_fp32(name: str) -> None:
    losses, model = train_boosted(Booster(mixed_precision=PRECISIONS[name]()), 3)
    expected, _ = train_plain(3)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    # One rounding of bf16 is 0.4%, of e4m3 6%; errors of single products average out in the loss.
    assert losses == pytest.approx(expected, rel=0.05 if name.startswith("fp8") else 0.01)


@pytest.mark.parametrize("left", [FORWARD_DTYPE, GRADIENT_DTYPE])
@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 17, 3)])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("fast_accumulation", [False, True])
def test_native_float8_is_the_reference(
    left: torch.dtype, shape: tuple[int, int, int], by_rows: bool, fast_accumulation: bool
) -> None:
    problem = native_problem("cuda", left, FORWARD_DTYPE, by_rows=by_rows)
    if problem is not None:
        pytest.skip(f"this device can't multiply {left}: {problem}")
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(0)
    a, scale_a = quantize(torch.randn(rows, inner, generator=generator).to("cuda"), left, 1 if by_rows else None)
    b, scale_b = quantize(
        torch.randn(inner, columns, generator=generator).to("cuda"), FORWARD_DTYPE, 0 if by_rows else None
    )
    product = scaled_matmul(a, b, scale_a, scale_b, torch.float32, emulate=False, fast_accumulation=fast_accumulation)
    expected = scaled_matmul_reference(a, b, scale_a, scale_b, torch.float32)
    # The products are exact; Hopper's float8 units add them up with 14 bits of mantissa. By rows they are in bf16.
    tolerance = 2.0**-8 if by_rows else 1e-3
    torch.testing.assert_close(product, expected, rtol=tolerance, atol=1e-3 * float(expected.abs().max()))
