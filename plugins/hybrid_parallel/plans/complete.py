"""Resolve a partial plan: blocks, tied weights, regions, size attributes, stacks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from booster.plugins.hybrid_parallel.plans.attributes import head_attributes
from booster.plugins.hybrid_parallel.plans.check import check_styles
from booster.plugins.hybrid_parallel.plans.draft import PartialPlan
from booster.plugins.hybrid_parallel.plans.features import COLUMN_STYLES, ROW_STYLES, split_dim
from booster.plugins.hybrid_parallel.plans.heads import blocks_of, check_replicated_parameters, find_attentions
from booster.plugins.hybrid_parallel.plans.plan import PlannedEntry, Style, TensorParallelPlan
from booster.plugins.hybrid_parallel.plans.regions import (
    TENSOR_AXIS_MODES,
    find_siblings,
    region_of,
    sequence_parallel_modules,
)
from booster.plugins.hybrid_parallel.plans.stacks import find_stacks
from booster.plugins.hybrid_parallel.plans.ties import resolve_ties
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear

__all__ = ["resolve_plan"]

_SHARDED_EMBEDDINGS = frozenset({"vocab", "vocab_head", "embedding_colwise", "embedding_colwise_gather_output"})
_WITH_REGION = COLUMN_STYLES | {"embedding_colwise"}


def resolve_plan(model: nn.Module, partial: PartialPlan, *, sequence_mode: str | None) -> TensorParallelPlan:
    """Resolve everything of a plan that follows from its styles and the model.

    Args:
        model: The user's model, possibly on the meta device.
        partial: The partial plan.
        sequence_mode: Mode of sequence parallelism, or None for unsharded sequences.

    Raises:
        ConfigError: The partial plan is not applicable to this model.
    """
    check_styles(model, partial.styles)
    given = {name: _head_style(model, name, style) for name, style in partial.styles.items()}
    styles, reasons = resolve_ties(model, given)
    stacks = find_stacks(model)
    attentions = find_attentions(model, styles)
    if not (partial.is_derived or partial.is_user_plan):
        check_replicated_parameters(model, styles, attentions)
    weights = {name: _weight(model, name, style) for name, style in styles.items()}
    blocks = {
        name: blocks_of(name, styles[name], tuple(weight.shape), dim, attentions)
        for name, (weight, dim) in weights.items()
        if weight is not None
    }
    siblings = find_siblings(model, styles, partial.siblings)
    regions = {name: region_of(name, style, stacks) for name, style in styles.items() if style.name in _WITH_REGION}
    regions = {name: region for name, region in regions.items() if not _is_parameter(model, name)}
    entries = [
        PlannedEntry(
            name=name,
            style=style.name,
            blocks=blocks.get(name, ()),
            dim=weights[name][1],
            region=regions.get(name, ""),
            siblings=siblings.get(name, ()),
            is_parameter=_is_parameter(model, name),
            reason=reasons.get(name, ""),
        )
        for name, style in styles.items()
    ]
    if sequence_mode in TENSOR_AXIS_MODES:
        replicated = sequence_parallel_modules(model, styles, regions, stacks)
        entries.extend(
            PlannedEntry(name=name, style="sequence", reason="runs on sharded tokens") for name in replicated
        )
    return TensorParallelPlan(
        entries=_sort_by_module(model, entries),
        attributes=(*head_attributes(model, attentions, blocks), *partial.attributes),
        arguments=partial.arguments,
        stacks=stacks,
        source=partial.source,
        notes=partial.notes,
    )


def _head_style(model: nn.Module, name: str, style: Style) -> Style:
    is_head = style.name == "vocab" and not _is_parameter(model, name) and is_linear(model.get_submodule(name))
    return Style("vocab_head") if is_head else style


def _weight(model: nn.Module, name: str, style: Style) -> tuple[torch.Tensor | None, int]:
    """Return the tensor that a style shards, or None, and the sharded dimension."""
    if style.name not in COLUMN_STYLES | ROW_STYLES | _SHARDED_EMBEDDINGS:
        return None, 0
    if _is_parameter(model, name):
        parameter = model.get_parameter(name)
        dim = parameter.ndim - 1 if style.name in ROW_STYLES else max(parameter.ndim - 2, 0)
        return parameter, dim
    module = model.get_submodule(name)
    return module.get_parameter("weight"), split_dim(module, style.name)


def _is_parameter(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(owner)._parameters


def _sort_by_module(model: nn.Module, entries: list[PlannedEntry]) -> tuple[PlannedEntry, ...]:
    names = [name for name, _ in model.named_modules()]
    order: Mapping[str, int] = {name: index for index, name in enumerate(names)}
    return tuple(sorted(entries, key=lambda entry: order.get(entry.name, order.get(entry.name.rpartition(".")[0], 0))))
