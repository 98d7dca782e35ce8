"""Tensors for tests of the Adam kernel, and ways to run it: compiled or as its reference, with any instruction set."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

import pytest
import torch

from booster.kernels import adam
from booster.kernels.adam import AdamSettings, adam_reference
from booster.kernels.loader import kernel_mode, load_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}
SETTINGS = AdamSettings(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
UNIT = 2.0**-24  # of fp32: the largest relative error of rounding once


@dataclass
class Operands:
    """The tensors of one parameter."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None = None

    def tensors(self):
        return [self.param, self.grad, self.exp_avg, self.exp_avg_sq, *([] if self.copy is None else [self.copy])]

    def clone(self):
        copy = None if self.copy is None else self.copy.clone()
        return Operands(self.param.clone(), self.grad.clone(), self.exp_avg.clone(), self.exp_avg_sq.clone(), copy)

    def slice(self, begin, end):
        copy = None if self.copy is None else self.copy[begin:end]
        return Operands(
            self.param[begin:end], self.grad[begin:end], self.exp_avg[begin:end], self.exp_avg_sq[begin:end], copy
        )


def operands(numel, *, seed=0, param=torch.float32, grad=torch.float32, copy=None):
    """Returns random tensors as they are after some steps, with gradients of many magnitudes."""
    random = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(numel, generator=random) * 2) * 1e-2
    return Operands(
        param=torch.randn(numel, generator=random).to(param),
        grad=(torch.randn(numel, generator=random) * scale).to(grad),
        exp_avg=torch.randn(numel, generator=random) * scale,
        exp_avg_sq=torch.rand(numel, generator=random) * scale.square(),
        copy=None if copy is None else torch.full((numel,), 7.0).to(copy),
    )


def load_native():
    """Returns the kernel; skips the test where nothing can be compiled, and fails it where compiling goes wrong."""
    module = load_kernel("adam")
    if module is None and (kernel_mode() == "reference" or shutil.which("c++") is None):
        pytest.skip("no compiler, or the references are asked for")
    assert module is not None, "the kernel could not be built"
    return module


def run_native(native, cases, settings=SETTINGS, *, steps=None, instruction_set=""):
    """Steps the cases in place by the kernel, in one call; returns them."""
    rows = [adam._row(case.param, case.grad, case.exp_avg, case.exp_avg_sq, case.copy) for case in cases]
    adam.native_adam(native, rows, steps or [3.0] * len(cases), settings, instruction_set)
    return cases


def run_reference(cases, settings=SETTINGS, *, steps=None):
    """Steps the cases in place by the reference; returns them."""
    lists = zip(*((case.param, case.grad, case.exp_avg, case.exp_avg_sq, case.copy) for case in cases), strict=True)
    adam_reference(*map(list, lists), steps or [3.0] * len(cases), settings)
    return cases


def changed(settings=SETTINGS, **values):
    return replace(settings, **values)


def same_bits(ours, theirs):
    """True if all tensors of two cases, or of two lists of them, are the same bit for bit, nan included."""
    if isinstance(ours, Operands):
        return all(_equal_bits(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def _equal_bits(ours, theirs):
    return ours.dtype is theirs.dtype and torch.equal(ours.view(BITS[ours.dtype]), theirs.view(BITS[theirs.dtype]))
