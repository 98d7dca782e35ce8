"""Checks of a plan, before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from booster.core.layer_stacks import find_stacks, stack_layer_of
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear, is_transposed
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import local_sizes

from .plan import (
    CLOSING_STYLES,
    COLUMN_STYLES,
    FEATURE_STYLES,
    OPEN_STYLES,
    ROW_STYLES,
    PlannedEntry,
    Style,
    TensorParallelPlan,
    feature_sizes,
)

_PARAMETER_STYLES = OPEN_STYLES | CLOSING_STYLES | {"replicated", "replicated_with_grad_allreduce"}


def check_styles(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Check that modules and parameters support their styles.

    Raises:
        ConfigError: A module or parameter does not support its style.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, style in styles.items():
        if name in parameters:
            if style.name not in _PARAMETER_STYLES:
                _raise_unsupported(name, style, "a bare parameter", "one of " + ", ".join(sorted(_PARAMETER_STYLES)))
        else:
            _check_module(name, style, model.get_submodule(name))


def check_plan(plan: TensorParallelPlan, model: nn.Module, tp_size: int, *, is_user_plan: bool = False) -> None:
    """Check that a plan is applicable to a number of ranks and does not change the model's results.

    Args:
        plan: The resolved plan.
        model: The user's model.
        tp_size: Number of tensor-parallel ranks.
        is_user_plan: If True, the plan is the user's: also check that every sharded output has a row-parallel consumer.

    Raises:
        ConfigError: The plan fails a check.
    """
    for entry in plan.entries:
        if entry.blocks:
            _check_blocks(entry, model, tp_size)
    for change in plan.attributes:
        change.local_value(tp_size, 0)
    if is_user_plan:
        _check_pairs(plan, model)


def _check_module(name: str, style: Style, module: nn.Module) -> None:
    kind = f"a {type(module).__name__}"
    if isinstance(module, nn.Linear) and "weight" not in module._parameters:
        kind += " whose weight is computed from other parameters (weight_norm, spectral_norm or a parametrization)"
        _raise_unsupported(name, style, kind, "a layer whose weight is a parameter")
    if style.name in COLUMN_STYLES | ROW_STYLES | {"vocab_head", "mla_kv_a_proj"} and not is_linear(module):
        _raise_unsupported(name, style, kind, "an nn.Linear or transformers' Conv1D")
    if style.name == "vocab_head" and is_transposed(module):
        _raise_unsupported(name, style, kind, "an nn.Linear")
    if style.name == "vocab" and not isinstance(module, (nn.Embedding, nn.Linear)):
        _raise_unsupported(name, style, kind, "an nn.Embedding, or the nn.Linear that computes logits")
    if style.name in FEATURE_STYLES and not isinstance(module, nn.Embedding):
        _raise_unsupported(name, style, kind, "an nn.Embedding")


def _raise_unsupported(name: str, style: Style, kind: str, expected: str) -> None:
    raise ConfigError(
        f"the plan has {style.name!r} for {name!r}, which is {kind}: this style is for {expected}. Leave it out of the"
        " plan, so that it is replicated, or name the layers inside of it"
    )


def _check_blocks(entry: PlannedEntry, model: nn.Module, tp_size: int) -> None:
    if not entry.style.startswith("vocab"):  # vocabularies are padded
        try:
            local_sizes(entry.blocks, tp_size)
        except ConfigError as error:
            raise ConfigError(f"{entry.name!r} ({entry.style}): {error}") from error
    tensor = model.get_parameter(entry.name if entry.is_parameter else f"{entry.name}.weight")
    if sum(block.size for block in entry.blocks) != tensor.shape[entry.dim]:
        raise ConfigError(
            f"the plan divides {tensor.shape[entry.dim]} features of {entry.name!r} into blocks of"
            f" {[block.size for block in entry.blocks]}, which do not add up: give the sizes into which the forward"
            " splits them"
        )
    if len(entry.blocks) > 1 and entry.style.endswith(("_gather_output", "_split_input")):
        raise ConfigError(
            f"the plan has {entry.style!r} for {entry.name!r} in {len(entry.blocks)} blocks, whose order would change"
            " in the all-gather of the ranks' shards: leave the blocks out, as input and output are unsharded"
        )


def _check_pairs(plan: TensorParallelPlan, model: nn.Module) -> None:
    """Check that every sharded output has a row-parallel consumer, and every row-parallel layer a producer."""
    stacks = plan.stacks or find_stacks(model)
    layers = [entry for entry in plan.entries if not entry.is_parameter]
    columns = [entry for entry in layers if entry.style in OPEN_STYLES]
    rows = [entry for entry in layers if entry.style in CLOSING_STYLES]
    for entry in columns:
        near = nearby_entries(entry, rows, stacks)
        if not near:
            scope = stack_layer_of(entry.name, stacks) or "the model"
            raise ConfigError(
                f"the plan has {entry.style!r} for {entry.name!r}, but no rowwise layer in {scope!r} reads its sharded"
                " output: give the layer that follows it 'rowwise', or this one 'colwise_gather_output'"
            )
        if not any(_fits(entry, row) for row in near):
            _raise_size_mismatch(entry, near, model)
    for entry in rows:
        if not nearby_entries(entry, columns, stacks):
            scope = stack_layer_of(entry.name, stacks) or "the model"
            raise ConfigError(
                f"the plan has {entry.style!r} for {entry.name!r}, but no colwise layer in {scope!r} shards its input:"
                " give the layers before it 'colwise', or this one 'rowwise_split_input'"
            )


def nearby_entries(
    entry: PlannedEntry, others: Iterable[PlannedEntry], stacks: tuple[tuple[str, ...], ...]
) -> list[PlannedEntry]:
    """Return the others in the same layer of a stack, only those in the same or a neighboring module if there are."""
    layer = stack_layer_of(entry.name, stacks)
    found = [other for other in others if stack_layer_of(other.name, stacks) == layer]
    for depth in (1, 2):
        outer = entry.name.rsplit(".", depth)[0]
        if close := [other for other in found if other.name.rsplit(".", depth)[0] == outer]:
            return close
    return found


def _fits(column: PlannedEntry, row: PlannedEntry) -> bool:
    """Whether the blocks are sharded equally for every number of ranks, or are heads with the same groups."""
    column_block, row_block = column.blocks[0], row.blocks[0]
    if (column_block.num_query_units or column_block.num_units) == (row_block.num_query_units or row_block.num_units):
        return True
    # Fused projections are sharded by groups of heads, the layer that reads their output by the heads of these groups.
    return column_block.num_units == (row_block.num_groups or row_block.num_units)


def _raise_size_mismatch(entry: PlannedEntry, rows: list[PlannedEntry], model: nn.Module) -> None:
    row = rows[0]
    column_blocks, row_blocks = (
        " + ".join(f"{block.num_units} x {block.unit_size}" for block in one.blocks) for one in (entry, row)
    )
    inputs = feature_sizes(model.get_submodule(row.name))[0]
    outputs = feature_sizes(model.get_submodule(entry.name))[1]
    raise ConfigError(
        f"the plan shards the {outputs} outputs of {entry.name!r} as {column_blocks} but the {inputs} inputs of"
        f" {row.name!r} as {row_blocks}: give both the same heads, as Style('colwise', num_heads=...) and"
        " Style('rowwise', num_heads=...), or leave both out of the plan"
    )
