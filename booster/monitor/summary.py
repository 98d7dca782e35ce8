"""Summary table of a boosted model: strategy, ranks, and the dtypes of every param group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from booster.core.shard_spec import is_sharded
from booster.interface import ModelWrapper, OptimizerWrapper, Plugin, shard_spec_of

_HEAD = ("group", "parameters", "parameter", "compute", "reduction", "master", "state")


def summarize(plugin: Plugin, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
    """Return the table as text. No communication."""
    axes = ", ".join(f"{axis}={size}" for axis, size in plugin.axis_sizes().items())
    precision = "fp32" if model.precision is None else model.precision.describe()
    lines = [
        f"plugin: {type(plugin).__name__}   ranks: {axes}   device: {plugin.device}   mixed precision: {precision}",
        f"model: {type(model.unwrap()).__name__}, {_count(model)}",
    ]
    return "\n".join(lines + (_table([_HEAD, *_rows(plugin, model, optimizer)]) if optimizer is not None else []))


def _count(model: ModelWrapper) -> str:
    """Return the number of parameters of the user's model, and of this rank where it is smaller."""
    parameters = list(model.parameters())
    total = _num_logical(model.logical_parameters())
    here = sum(parameter.numel() for parameter in parameters)
    return f"{total:,} parameters" + (f", {here:,} on this rank" if any(map(is_sharded, parameters)) else "")


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


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
