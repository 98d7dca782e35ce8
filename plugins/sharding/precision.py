"""Precision of a model whose weights are cast to one dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from booster.interface import MixedPrecision
from booster.mixed_precision.fp16 import cast_floats, low_precision_to_fp32

# Weight dtype by precision name; None keeps the model's dtypes.
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class WeightPrecision(MixedPrecision):
    """Computation in the weights' dtype.

    Args:
        dtype: Dtype of weights, buffers and computation.
        cast_inputs: If True, cast floating-point inputs to that dtype.
        outputs_fp32: If True, cast low-precision outputs to fp32.
    """

    def __init__(self, dtype: torch.dtype, *, cast_inputs: bool, outputs_fp32: bool = True) -> None:
        self._dtype = dtype
        self._outputs_fp32 = outputs_fp32
        self._cast_inputs = cast_inputs

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._dtype

    def describe(self) -> str:
        return f"{str(self._dtype).removeprefix('torch.')} weights"

    def cast(self, model: nn.Module) -> None:
        """Cast floating-point parameters and buffers in place; Parameter objects stay the same."""
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.dtype != self._dtype:
                tensor.data = tensor.data.to(self._dtype)

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floats(self._dtype, (args, kwargs)) if self._cast_inputs else (args, kwargs)

    def convert_outputs(self, outputs: Any) -> Any:
        return low_precision_to_fp32(outputs) if self._outputs_fp32 else outputs
