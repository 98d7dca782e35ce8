"""The form in which the kernels take a parameter's state, whoever put it there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from booster.optim.memory_order import is_dense, laid_out_like
from booster.optim.update import MOMENTS

__all__ = ["complete_moments", "complete_step", "moment_dtype"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def moment_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the format of a parameter's moments."""
    dtype = parameter.dtype
    # torch's kernels for accelerators ask for one dtype of parameter and states.
    return torch.float32 if dtype in _LOW_PRECISION and parameter.is_cpu else dtype


def complete_step(state: dict[str, Any]) -> Tensor:
    """Makes "step" an fp32 tensor on the CPU, zero where there is none, and returns it."""
    step = state.get("step")
    if not (isinstance(step, Tensor) and step.is_cpu and step.dtype is torch.float32):
        step = state["step"] = torch.tensor(0.0 if step is None else float(step), dtype=torch.float32)
    return step


def complete_moments(state: dict[str, Any], parameter: Tensor) -> None:
    """Makes the moments tensors beside the parameter, in its memory order; zeros where there are none."""
    dtype = moment_dtype(parameter)
    for key in MOMENTS:
        value = state.get(key)
        if value is None:
            state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        elif not _is_in_form(value, parameter, dtype):
            model = parameter if is_dense(parameter) else parameter.contiguous()
            state[key] = laid_out_like(value, model, dtype)


def _is_in_form(value: Tensor, parameter: Tensor, dtype: torch.dtype) -> bool:
    if value.dtype is not dtype:
        return False
    if parameter.is_cpu and value.is_cpu and parameter.is_contiguous():
        return value.is_contiguous()
    return value.device == parameter.device and value.stride() == parameter.stride()
