"""Format a plan as a table of styles, local shapes and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import sharded_spec, vocabulary_rows

from .plan import PlannedEntry, TensorParallelPlan, generalize

_BY_ROWS = frozenset({"vocab", "vocab_head"})
_HEADER = ("module", "style", "local shape", "bytes")


def explain(
    plan: TensorParallelPlan, model: nn.Module, tp_size: int, rank: int = 0, *, vocabulary_multiple: int = 64
) -> str:
    """Return a plan as a table: module, style, local shape, bytes; equal layers share a row.

    Args:
        plan: The resolved plan.
        model: The unsharded model.
        tp_size: Number of tensor-parallel ranks.
        rank: Tensor-parallel rank whose shards are listed.
        vocabulary_multiple: Multiple to which the vocabulary is padded.
    """
    entries = _entries_of(plan, model)
    rows: dict[tuple[str, str, str], list[int]] = {}
    seen: set[int] = set()
    local = full = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        planned_name, entry = entries.get(id(parameter), (name, None))
        shape = _local_shape(planned_name, parameter, entry, tp_size, rank, vocabulary_multiple)
        is_new = id(parameter) not in seen
        size = math.prod(shape) * parameter.element_size() * is_new
        local += size
        full += parameter.numel() * parameter.element_size() * is_new
        seen.add(id(parameter))
        style = (entry.style if entry else "replicated") + ("" if is_new else " (shared)")
        key = (generalize(name), style, _shape_text(shape, tuple(parameter.shape)))
        rows.setdefault(key, []).append(size)
    table = [(*_add_count(key, len(sizes)), f"{sum(sizes):,}") for key, sizes in rows.items()]
    lines = _align([_HEADER, *table])
    lines.append(f"rank {rank} of {tp_size} holds {local:,} of {full:,} bytes")
    lines.extend(_footer(plan))
    return "\n".join(lines)


def _entries_of(plan: TensorParallelPlan, model: nn.Module) -> dict[int, tuple[str, PlannedEntry]]:
    """Return each parameter's planned name and entry by id; a tied parameter has several names."""
    by_name = {entry.name: entry for entry in plan.entries}
    found: dict[int, tuple[str, PlannedEntry]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry = by_name.get(name) or by_name.get(name.rpartition(".")[0])
        if entry is not None and (entry.blocks or id(parameter) not in found):
            found[id(parameter)] = (name, entry)
    return found


def _local_shape(
    name: str,
    parameter: torch.Tensor,
    entry: PlannedEntry | None,
    tp_size: int,
    rank: int,
    multiple: int,
) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if entry is None or not entry.blocks:
        return shape
    if entry.style in _BY_ROWS:
        return (vocabulary_rows(shape[0], multiple, tp_size, rank)[2], *shape[1:])
    if not entry.is_parameter and name.rpartition(".")[2] != "weight":
        if "rowwise" in entry.style:
            return shape  # a replicated bias, added after the reduction
        return sharded_spec(shape, 0, entry.blocks, tp_size, rank).local_shape
    return sharded_spec(shape, entry.dim, entry.blocks, tp_size, rank).local_shape


def _shape_text(local: tuple[int, ...], full: tuple[int, ...]) -> str:
    text = "x".join(str(size) for size in local) or "scalar"
    return text if local == full else f"{text} of {'x'.join(str(size) for size in full)}"


def _add_count(key: tuple[str, str, str], count: int) -> tuple[str, str, str]:
    name, style, shape = key
    return (f"{name} ({count})" if count > 1 else name), style, shape


def _align(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = []
    for row in rows:
        *texts, number = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        lines.append("  ".join([*texts, number.strip().rjust(widths[-1])]))
    return lines


def _footer(plan: TensorParallelPlan) -> list[str]:
    lines = [f"plan: {plan.source}"]
    attributes = dict.fromkeys(f"{generalize(change.module)}.{change.attribute}" for change in plan.attributes)
    if attributes:
        lines.append(f"attributes set to local sizes: {', '.join(attributes)}")
    arguments = dict.fromkeys(f"{generalize(one.module)}({one.argument})" for one in plan.arguments)
    if arguments:
        lines.append(f"arguments sharded by heads: {', '.join(arguments)}")
    reasons = dict.fromkeys(f"{generalize(one.name)}: {one.reason}" for one in plan.entries if one.reason)
    return [*lines, *reasons, *plan.notes]
