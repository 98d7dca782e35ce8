"""Shard specs of a model's parameters under a tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from booster.errors import ConfigError
from booster.interface import ShardSpec
from booster.plugins.hybrid_parallel.plans.features import COLUMN_STYLES, ROW_STYLES
from booster.plugins.hybrid_parallel.plans.plan import PlannedEntry, TensorParallelPlan
from booster.plugins.hybrid_parallel.tensor_parallel.splits import sharded_spec, vocabulary_spec

__all__ = ["planned_shard_specs"]

_VOCABULARY_STYLES = frozenset({"vocab", "vocab_head"})
_FEATURE_STYLES = frozenset({"embedding_colwise", "embedding_colwise_gather_output"})
_SHARDED_STYLES = COLUMN_STYLES | ROW_STYLES | _VOCABULARY_STYLES | _FEATURE_STYLES


def planned_shard_specs(
    model: nn.Module, plan: TensorParallelPlan, num_ranks: int, vocabulary_multiple: int
) -> dict[str, list[ShardSpec]]:
    """Return each parameter's shard specs by name, tied parameters once, one spec per rank.

    Args:
        model: The user's unsharded model, possibly on the meta device.
        plan: Tensor-parallel style of each module.
        num_ranks: Number of tensor-parallel ranks.
        vocabulary_multiple: Multiple to which the vocabulary is padded.

    Raises:
        ConfigError: Modules that share a parameter shard it in different ways.

    Collective: no.
    """
    sharded: dict[int, tuple[str, list[ShardSpec]]] = {}
    for name, parameter, entry, own_name in _planned_parameters(model, plan):
        shard_specs = [
            _shard_spec(entry, own_name, parameter, num_ranks, rank, vocabulary_multiple) for rank in range(num_ranks)
        ]
        other = sharded.setdefault(id(parameter), (name, shard_specs))
        if other[1] != shard_specs:
            raise ConfigError(
                f"{name!r} is the same parameter as {other[0]!r}, but the plan shards them differently: give both"
                " modules styles that shard the same dimension, such as 'vocab' and 'vocab_head', or none"
            )
    found = {}
    for name, parameter in model.named_parameters():
        replicated = [ShardSpec.unsharded(parameter.shape, is_primary=rank == 0) for rank in range(num_ranks)]
        found[name] = sharded.get(id(parameter), (name, replicated))[1]
    return found


def _planned_parameters(
    model: nn.Module, plan: TensorParallelPlan
) -> Iterator[tuple[str, nn.Parameter, PlannedEntry, str]]:
    """Yield the planned parameters: full name, parameter, entry and name within the module."""
    modules = dict(model.named_modules())
    for entry in plan.entries:
        if entry.is_parameter:
            module_name, _, own_name = entry.name.rpartition(".")
            yield entry.name, modules[module_name]._parameters[own_name], entry, "weight"  # type: ignore[misc]
            continue
        if entry.style not in _SHARDED_STYLES:
            continue  # the style covers a subtree, whose parameters may have their own entries
        for own_name, parameter in modules[entry.name].named_parameters(recurse=False):
            yield f"{entry.name}.{own_name}", parameter, entry, own_name


def _shard_spec(
    entry: PlannedEntry, own_name: str, parameter: nn.Parameter, num_ranks: int, rank: int, multiple: int
) -> ShardSpec:
    shape, style, is_bias = tuple(parameter.shape), entry.style, own_name == "bias"
    if style in _VOCABULARY_STYLES:
        return vocabulary_spec(shape, multiple, num_ranks, rank)
    is_sharded = entry.is_parameter or style in COLUMN_STYLES or (style in ROW_STYLES | _FEATURE_STYLES and not is_bias)
    if not is_sharded or not entry.blocks:
        return ShardSpec.unsharded(shape, is_primary=rank == 0)
    return sharded_spec(shape, 0 if is_bias else entry.dim, entry.blocks, num_ranks, rank)
