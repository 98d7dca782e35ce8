"""An optimizer that multiplies gradients within its step gives what multiplying them first gives."""

from __future__ import annotations

import pytest
import torch
from oracles.fused_sgd import FusedSGD
from torch import nn

from booster.interface import ModelWrapper, OptimizerWrapper
from booster.mixed_precision.fp16 import Fp32MasterWeights
from booster.mixed_precision.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaleConfig


class PlainSGD(torch.optim.SGD):
    """Has no fused step."""


def build(cls, dtype=torch.bfloat16, scaler=None):
    """Returns a wrapped low-precision model with one fp32 layer between the others, over optimizer `cls`."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    originals = {id(parameter): parameter.detach().clone() for parameter in module.parameters()}
    module[0].to(dtype)
    module[3].to(dtype)
    groups = [{"params": [*module[0].parameters(), *module[2].parameters()], "lr": 0.1}]
    optim = cls([*groups, {"params": module[3].parameters(), "lr": 0.05}], lr=1.0)
    optimizer = OptimizerWrapper(optim, ModelWrapper(module))
    optimizer.master_weights = Fp32MasterWeights(optim, originals)
    optimizer.loss_scaler = scaler
    return module, optimizer


def loss_of(module, seed, factor=1.0):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    hidden = module[1](module[0](x.to(module[0].weight.dtype)).float())
    return module[3](module[2](hidden).to(module[3].weight.dtype)).float().square().mean() * factor


def run(cls, *, scaler=None, clip=None, value=None, norms=False, items=False, dtype=torch.bfloat16, factors=(1.0,) * 4):
    """Trains a few steps; returns masters and weights, the norms seen, and the optimizer."""
    module, optimizer = build(cls, dtype, scaler)
    seen = []
    for step, factor in enumerate(factors):
        for part in range(2):
            optimizer.backward(loss_of(module, 2 * step + part, factor), num_items=3 + part if items else None)
        for max_norm in clip or ():
            seen.append(float(optimizer.clip_grad_by_norm(max_norm)))
        if value is not None:
            optimizer.clip_grad_by_value(value)
        if norms:
            seen.append(optimizer.get_grad_norm())
        optimizer.step()
        optimizer.zero_grad()
    masters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    return masters + [parameter.detach() for parameter in module.parameters()], seen, optimizer


CASES = {
    "nothing": {},
    "scaler": {"scaler": 2.0**10},
    "clip": {"clip": (0.05,)},
    "clip twice": {"clip": (0.05, 0.01)},
    "clip and scale": {"clip": (0.05,), "scaler": 2.0**10},
    "clip without effect": {"clip": (1e6,)},
    "value": {"value": 0.01, "scaler": 2.0**10},
    "clip and value": {"clip": (0.05,), "value": 0.01},
    "norm": {"norms": True, "scaler": 2.0**10},
    "items": {"items": True, "clip": (0.05,)},
    "fp16": {"dtype": torch.float16, "scaler": 2.0**10, "clip": (0.05,)},
}


@pytest.mark.parametrize("case", CASES)
def test_masters_of_low_precision(case):
    settings = dict(CASES[case])
    scale = settings.pop("scaler", None)
    results = []
    for cls in (PlainSGD, FusedSGD):
        results.append(run(cls, scaler=None if scale is None else ConstantLossScaler(scale), **settings))
    (plain, plain_norms, _), (fused, fused_norms, optimizer) = results
    assert (optimizer.optim.num_fused, optimizer.optim.num_plain) == ((0, 4) if "value" in case else (4, 0))
    assert fused_norms == pytest.approx(plain_norms, rel=1e-6)  # one adds up before the multiplication
    for ours, theirs in zip(fused, plain, strict=True):
        # Masters may differ in the last digits of a clip coefficient, which a rounding to bf16 then shows.
        bound = 1e-6 if ours.dtype is torch.float32 else torch.finfo(ours.dtype).eps
        assert torch.allclose(ours.float(), theirs.float(), rtol=bound, atol=1e-7)


def test_an_overflow_skips_the_step():
    factors = (1.0, float("inf"), 1.0, 1.0)
    config = LossScaleConfig(2.0**8, 2.0, 0.5, 100)
    ours, _, optimizer = run(FusedSGD, scaler=DynamicLossScaler(config), clip=(0.1,), factors=factors)
    theirs, _, _ = run(PlainSGD, scaler=DynamicLossScaler(config), clip=(0.1,), factors=factors)
    assert optimizer.num_skipped_steps == 1
    assert optimizer.optim.num_fused == 3
    assert all(torch.allclose(one.float(), other.float(), rtol=1e-2) for one, other in zip(ours, theirs, strict=True))
    assert all(torch.isfinite(one).all() for one in ours)


def test_a_second_step_without_a_backward_repeats_the_first():
    results = []
    for cls in (PlainSGD, FusedSGD):
        module, optimizer = build(cls)
        optimizer.backward(loss_of(module, 0))
        optimizer.clip_grad_by_norm(0.05)
        optimizer.step()
        optimizer.step()
        results.append([parameter.detach().float() for parameter in module.parameters()])
    assert all(torch.allclose(one, other, rtol=1e-2) for one, other in zip(*results, strict=True))


def test_hooks_get_the_true_gradients():
    module, optimizer = build(FusedSGD, scaler=ConstantLossScaler(2.0**10))
    seen = []
    optimizer.register_gradient_hook(lambda gradients: seen.extend(gradient.clone() for gradient in gradients))
    optimizer.backward(loss_of(module, 0))
    optimizer.step()
    twin, _ = build(PlainSGD)
    loss_of(twin, 0).backward()
    assert optimizer.optim.num_plain == 1
    expected = [parameter.grad.float() for parameter in twin.parameters()]
    assert all(torch.allclose(one, other, rtol=1e-2) for one, other in zip(seen, expected, strict=True))
