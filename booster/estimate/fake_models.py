"""Fake or meta copies of models and batches, with the same shapes, dtypes and strides."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from booster.errors import ConfigError
from booster.tensor_tree import map_tensors

__all__ = ["fake_batch", "fake_copy", "meta_copy", "new_fake_mode"]


def new_fake_mode() -> FakeTensorMode:
    """Return a `FakeTensorMode` that accepts real tensors as inputs, such as constants of a model's code."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model with fake parameters and buffers on the CPU; tied ones stay tied.

    Args:
        model: Model with real values, on the meta device, or lazily initialized. Not modified.
        mode: Result of `new_fake_mode`.

    Raises:
        ConfigError: The model can't be copied.
    """
    with mode:
        return _copy(model, "cpu")


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; see `fake_copy`."""
    return _copy(model, "meta")


def _copy(model: nn.Module, device: str) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_like(parameter, device), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _like(buffer, device)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{type(model).__name__} can't be copied, which an estimate requires ({error}): remove the attributes that"
            " can't be copied from the model"
        ) from error


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Return a copy of a batch with fake tensors on the CPU."""
    with mode:
        return map_tensors(lambda tensor: _like(tensor, "cpu"), batch)


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    # Dense, in the order of its strides: a view may have gaps, a copy has none.
    given: tuple[int, ...] = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-given[dim], dim))
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= tensor.shape[dim]
    return torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device=device)
