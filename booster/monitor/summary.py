"""Summary table of a boosted model: strategy, ranks, and the dtypes of every param group."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from booster.core.shard_spec import is_sharded
from booster.interface import ModelWrapper, OptimizerWrapper, Plugin, shard_spec_of

_HEAD = ("group", "parameters", "parameter", "compute", "reduction", "master", "state")


def summarize(plugin: Plugin, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
    """Return the table as text. No communication."""
    axes = ", ".join(f"{axis}={size}" for axis, size in plugin.axis_sizes().items())
    precision = "fp32" if model.precision is None else model.precision.describe()
    count = f"{_num_logical(model.logical_parameters()):,} parameters"
    parameters = list(model.parameters())
    if any(map(is_sharded, parameters)):
        count += f", {sum(parameter.numel() for parameter in parameters):,} on this rank"
    lines = [
        f"plugin: {type(plugin).__name__}   ranks: {axes}   device: {plugin.device}   mixed precision: {precision}",
        f"model: {type(model.unwrap()).__name__}, {count}",
    ]
    if optimizer is not None:
        rows = [_HEAD, *_rows(plugin, model, optimizer)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _rows(plugin: Plugin, model: ModelWrapper, optimizer: OptimizerWrapper) -> Iterable[tuple[str, ...]]:
    for index, group in enumerate(optimizer.param_groups):
        optimizer_params = group["params"]
        model_params = optimizer.group_parameters(index)
        compute = None if model.precision is None else model.precision.compute_dtype
        states = [value for parameter in optimizer_params for value in optimizer.state.get(parameter, {}).values()]
        yield (
            str(index),
            f"{_num_logical(model_params):,}",
            _dtypes(parameter.dtype for parameter in model_params),
            _dtypes([compute] if compute is not None else [parameter.dtype for parameter in model_params]),
            _dtypes(plugin.reduction_dtype(parameter.dtype) for parameter in model_params),
            _dtypes(master.dtype for master in optimizer.group_masters(index)) or "none",
            _dtypes(value.dtype for value in states if isinstance(value, torch.Tensor)) or "none yet",
        )


def _num_logical(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(math.prod(shard_spec_of(parameter).logical_shape) for parameter in parameters)


def _dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
