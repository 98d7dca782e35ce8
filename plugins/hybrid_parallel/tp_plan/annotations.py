"""Plans derived from placements of parameters: `{"fc1.weight": Shard(0)}`, or those that `booster.shard` has given.

A placement says which part of a parameter a rank holds. What the layer computes follows: a linear layer with a shard of
its output features is column-parallel, one with a shard of its input features row-parallel. The output of a
column-parallel layer stays sharded if a row-parallel layer reads it, otherwise it is gathered; a row-parallel layer
whose input is not sharded splits it. Which layers belong together is decided by their place: those in one module, else
those in neighboring modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.placements import placement_of, sharded_dim
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear, is_transposed

from .adapters import unwrapped_model
from .attention_heads import owner_of, role_of
from .auto_plan import derive_splits
from .plan import AttributeChange, PartialPlan, Style, feature_sizes, match_names

_COLUMN, _ROW = "column", "row"


@dataclass(frozen=True, slots=True)
class _Mark:
    """A sharded layer. `kind` is "column", "row", or the style of an embedding."""

    kind: str
    dim: int


def marked_placements(model: nn.Module) -> dict[str, Any]:
    """Return the placements of parameters that `booster.shard` has given, by all of their names."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        placement = placement_of(parameter)
        if placement is not None:
            found[name] = placement
    return found


def plan_of_placements(
    model: nn.Module, given: Mapping[str, Any], marked: Mapping[str, Any], *, tp_size: int
) -> PartialPlan:
    """Derive a plan from placements.

    Args:
        model: The user's model.
        given: Placements by pattern of parameter names.
        marked: Placements by parameter name.
        tp_size: Number of tensor-parallel ranks.

    Raises:
        ConfigError: A pattern matches no parameter, a placement fits to no layer, or placements contradict each other.
    """
    outer, inner = unwrapped_model(model)
    prefix = f"{outer}." if outer else ""
    names = [name for name, _ in inner.named_parameters(remove_duplicate=False)]
    patterns = {pattern.removeprefix(prefix): placement for pattern, placement in given.items()}
    matched, unmatched = match_names(patterns, names, str(getattr(inner, "base_model_prefix", "")))
    if unmatched:
        raise ConfigError(
            f"the plan has a placement for {unmatched[0]!r}, which matches no parameter: write names as in"
            " model.named_parameters(), with * for a layer's index"
        )
    dims = _dims(model, marked, {f"{prefix}{name}": placement for name, placement in matched.items()})
    layers = _layers(model, dims)
    if not layers:
        raise ConfigError(
            f"the placements replicate {len(dims)} parameters and shard none, so that tp_size > 1 has no effect: shard"
            " some, as in {'fc1.weight': Shard(0)}, or use tp_size=1"
        )
    styles, attributes = _styles(model, layers, tp_size)
    return PartialPlan(
        styles=styles,
        source="derived from the placements of parameters",
        is_user_plan=True,
        attributes=attributes,
        reasons={name: _reason(mark, styles[name]) for name, mark in layers.items()},
    )


def _dims(model: nn.Module, *sources: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the sharded dimension of each parameter by name, the same for all names of a tied one."""
    by_id: dict[int, tuple[str, int | None]] = {}
    for placements in sources:
        for name, placement in placements.items():
            parameter = model.get_parameter(name)
            dim = sharded_dim(f"the parameter {name!r}", tuple(parameter.shape), placement)
            first, known = by_id.setdefault(id(parameter), (name, dim))
            if known != dim:
                other = "Replicate()" if known is None else f"Shard({known})"
                where = "by booster.shard()" if first == name else f"as {first!r}, which is the same parameter,"
                raise ConfigError(f"{name!r} is {placement!r} in the plan, but {where} {other}: give one of them only")
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: by_id[id(parameter)][1] for name, parameter in parameters if id(parameter) in by_id}


def _layers(model: nn.Module, dims: Mapping[str, int | None]) -> dict[str, _Mark]:
    """Return the sharded layers by name, in the model's order."""
    found: dict[str, _Mark] = {}
    for name, dim in dims.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf == "weight" and dim is not None:
            found[owner] = _Mark(_kind(owner, module, dim), dim)
        elif leaf != "bias" and dim is not None:
            _raise_unsupported(name, module)
    for name, dim in dims.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == "bias":
            _check_bias(name, dim, found.get(owner))
    return found


def _kind(name: str, module: nn.Module, dim: int) -> str:
    if is_linear(module):
        return _COLUMN if dim == (1 if is_transposed(module) else 0) else _ROW
    if isinstance(module, nn.Embedding):
        return "vocab" if dim == 0 else "embedding_colwise_gather_output"
    _raise_unsupported(f"{name}.weight", module)
    raise AssertionError  # not reached


def _raise_unsupported(name: str, module: nn.Module) -> None:
    raise ConfigError(
        f"{name!r} is to be sharded, which is a parameter of a {type(module).__name__}: placements shard the weights of"
        " linear layers and embeddings. Leave it replicated, or give its module a style instead, as in plan={'module':"
        " 'rowwise'}"
    )


def _check_bias(name: str, dim: int | None, mark: _Mark | None) -> None:
    if mark is None:
        if dim is None:
            return
        raise ConfigError(
            f"{name!r} is to be sharded, but not the weight beside it: give the weight a placement as well, which"
            " decides what the layer computes, or leave the bias out"
        )
    is_sharded = mark.kind == _COLUMN
    if is_sharded != (dim is not None):
        sharded, placement = ("outputs", "Shard(0)") if is_sharded else ("inputs", "Replicate()")
        raise ConfigError(
            f"{name!r} is {'Replicate()' if dim is None else 'Shard(0)'}, but the weight beside it is sharded by its"
            f" {sharded}, so that the bias is {placement}: write that, or leave the bias out"
        )


def _styles(
    model: nn.Module, layers: Mapping[str, _Mark], tp_size: int
) -> tuple[dict[str, Style], tuple[AttributeChange, ...]]:
    columns = [name for name, mark in layers.items() if mark.kind == _COLUMN]
    rows = [name for name, mark in layers.items() if mark.kind == _ROW]
    pairs = _pairs(model, columns, rows)
    styles = {name: Style(mark.kind) for name, mark in layers.items() if mark.kind not in (_COLUMN, _ROW)}
    paired = {column for found in pairs.values() for column in found}
    styles |= {name: Style("colwise_gather_output") for name in columns if name not in paired}
    styles |= {name: Style("rowwise_split_input") for name in rows if not pairs[name]}
    attributes: list[AttributeChange] = []
    for owner in dict.fromkeys(owner_of(row) for row, found in pairs.items() if found):
        inside = {name for name in (*paired, *rows) if name not in styles and name.rpartition(".")[0] == owner}
        splits = derive_splits(model, owner, inside, tp_size)
        if splits is not None:
            styles |= splits.styles
            attributes.extend(splits.attributes)
    for row, found in pairs.items():
        inputs = feature_sizes(model.get_submodule(row))[0]
        for name in found:
            styles.setdefault(name, _column_style(model, name, inputs))
        styles.setdefault(row, Style("rowwise"))
    return {name: styles[name] for name in layers}, tuple(attributes)


def _pairs(model: nn.Module, columns: Iterable[str], rows: Iterable[str]) -> dict[str, list[str]]:
    """Return for each row-parallel layer the column-parallel ones whose output it reads."""
    columns, rows = list(columns), list(rows)
    with_rows = {owner_of(row) for row in rows}
    found: dict[str, list[str]] = {}
    for row in rows:
        inputs = feature_sizes(model.get_submodule(row))[0]
        near = [name for name in columns if owner_of(name) == owner_of(row)]
        if not near:
            outer = owner_of(row).rpartition(".")[0]
            apart = (name for name in columns if owner_of(name) not in with_rows)
            near = [name for name in apart if owner_of(row) and owner_of(name).rpartition(".")[0] == outer]
        outputs = {name: feature_sizes(model.get_submodule(name))[1] for name in near}
        # Key-value heads may be fewer.
        found[row] = [name for name in near if outputs[name] % inputs == 0 or role_of(name)]
    return found


def _column_style(model: nn.Module, name: str, inputs: int) -> Style:
    outputs = feature_sizes(model.get_submodule(name))[1]
    if role_of(name) == "fused":
        return Style("packed_colwise", num_blocks=3)
    num_blocks = outputs // inputs
    return Style("packed_colwise", num_blocks=num_blocks) if num_blocks > 1 and not role_of(name) else Style("colwise")


def _reason(mark: _Mark, style: Style) -> str:
    after = {
        "colwise_gather_output": ", and no row-parallel layer beside it reads its output",
        "rowwise_split_input": ", and no column-parallel layer beside it shards its input",
    }
    return f"the weight is Shard({mark.dim})" + after.get(style.name, "")
