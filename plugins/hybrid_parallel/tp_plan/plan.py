"""Data classes of tensor-parallel plans. Plans are equal on all ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn

from booster.core.shard_spec import ShardSpec
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_transposed
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block, units_of_rank

_HEADER = ("module", "style", "local shape", "bytes")


def explain(
    plan: TensorParallelPlan, model: nn.Module, shard_specs: Mapping[str, ShardSpec], rank: int, num_ranks: int
) -> str:
    """Return a plan as a table: module, style, local shape, bytes; equal layers share a row.

    Args:
        plan: The resolved plan.
        model: The unsharded model.
        shard_specs: Shard specs of a rank's parameters by name, tied parameters once.
        rank: The tensor-parallel rank.
        num_ranks: Number of tensor-parallel ranks.
    """
    entries = _entries_of(plan, model)
    shapes = {id(model.get_parameter(name)): spec for name, spec in shard_specs.items()}
    rows: dict[tuple[str, str, str], list[int]] = {}
    seen: set[int] = set()
    local = full = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry = entries.get(id(parameter))
        spec = shapes[id(parameter)]
        is_new = id(parameter) not in seen
        size = math.prod(spec.local_shape) * parameter.element_size() * is_new
        local += size
        full += parameter.numel() * parameter.element_size() * is_new
        seen.add(id(parameter))
        style = (entry.style if entry else "replicated") + ("" if is_new else " (shared)")
        if spec.is_expert:
            style = f"expert, {entry.style}" if entry else "expert"
        local_text, full_text = (
            "x".join(map(str, sizes)) or "scalar" for sizes in (spec.local_shape, spec.logical_shape)
        )
        shape_text = local_text if local_text == full_text else f"{local_text} of {full_text}"
        rows.setdefault((generalize(name), style, shape_text), []).append(size)
    table = [
        (f"{name} ({len(sizes)})" if len(sizes) > 1 else name, style, shape_text, f"{sum(sizes):,}")
        for (name, style, shape_text), sizes in rows.items()
    ]
    lines = aligned([_HEADER, *table], num_texts=3)
    lines.append(f"rank {rank} of {num_ranks} holds {local:,} of {full:,} bytes")
    lines.extend(_footer(plan))
    return "\n".join(lines)


def _entries_of(plan: TensorParallelPlan, model: nn.Module) -> dict[int, PlannedEntry]:
    """Return each parameter's entry by id; a tied parameter has several names."""
    by_name = {entry.name: entry for entry in plan.entries}
    found: dict[int, PlannedEntry] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry = by_name.get(name) or by_name.get(name.rpartition(".")[0])
        if entry is not None and (entry.blocks or id(parameter) not in found):
            found[id(parameter)] = entry
    return found


def aligned(rows: Sequence[Sequence[str]], num_texts: int) -> list[str]:
    """Return the lines of a table, whose first columns are texts and the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < num_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


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


# A plan has an *entry* for every module (rarely, a bare parameter) that is not simply replicated. The styles of entries
# are listed in `Style`, with the names of transformers. On a bare parameter (the weights of all experts in one tensor)
# colwise, packed_colwise, rowwise and packed_rowwise only determine the sharded dimension: the module around it has its
# own entry, which determines the communication.


@dataclass(frozen=True, slots=True)
class Style:
    """Tensor-parallel style of a module, for users' plans; a string is short for a style with a name only.

    Names:

    - `"colwise"`: column-parallel linear layer; its output stays sharded, for a rowwise layer.
    - `"colwise_gather_output"`: column-parallel linear layer with a gathered output.
    - `"packed_colwise"`: colwise with several consecutive blocks (query, key and value; gate and up). As a string,
      `"packed_colwise:3"` includes the number of blocks.
    - `"rowwise"`: row-parallel linear layer with a sharded input; its output is all-reduced.
    - `"rowwise_split_input"`: row-parallel linear layer that shards its replicated input.
    - `"packed_rowwise"`: rowwise with several consecutive blocks of inputs.
    - `"vocab"`: embedding sharded over rows; its output is all-reduced.
    - `"vocab_head"`: linear layer that computes logits, sharded over rows, like an embedding tied to it.
    - `"embedding_colwise"`: embedding sharded over features (T5's relative bias, by heads); its output stays sharded.
    - `"embedding_colwise_gather_output"`: embedding sharded over features with a gathered output.
    - `"replicated_with_grad_allreduce"`: replicated module on sharded features; its gradient is all-reduced.
    - `"sequence"`: replicated; its gradient is all-reduced in modes that shard the sequence on the tp axis.
    - `"replicated"`: replicated, overriding less specific patterns.
    - `"moe_tp_experts"`, `"moe_identity_expert"`, `"mla_kv_a_proj"`, `"all_reduce"`, `"local_params"`: as in
      transformers, for its experts and latent attention.

    Attributes:
        name: One of the names above.
        blocks: Consecutive blocks of the sharded dimension; optional, defaults to one block of single features, or of
            the heads in the model's configuration.
        num_heads: Number of heads of the only block, instead of `blocks`; a head is not divided between ranks.
        num_blocks: Number of equal blocks of a packed layer, instead of `blocks`; optional, defaults to query, key and
            value by the layer's name, otherwise two.
    """

    name: str
    blocks: tuple[Block, ...] = ()
    num_heads: int | None = None
    num_blocks: int | None = None


UserPlan: TypeAlias = Mapping[str, Any]
"""Styles (names or `Style`) by pattern of module names, placements by pattern of parameter names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEntry:
    """Plan of one module.

    Attributes:
        name: Name of the module in the user's model, or of a bare parameter.
        style: Name of the style; see `Style`. Dropout of a replicated or a sharded input of an adapter has the style
            "replicated_dropout" or "sharded_dropout", magnitudes of DoRA "dora".
        blocks: Blocks of the sharded dimension, () if nothing is sharded.
        dim: The sharded dimension of the weight or bare parameter.
        region: Name of the module whose input starts the parallel region, where a sharded sequence is gathered. ""
            outside of all stacks of layers, or with an input from there, which is never sharded.
        siblings: Names of the column-parallel modules that read the same input, including this one.
        is_parameter: Whether `name` is a bare parameter.
        reads_region: Whether it reads the region's input, rather than what another layer computes from it.
        reason: Reason of a style that the plan's source did not give; printed by `explain`.
    """

    name: str
    style: str
    blocks: tuple[Block, ...] = ()
    dim: int = 0
    region: str = ""
    siblings: tuple[str, ...] = ()
    is_parameter: bool = False
    reads_region: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeChange:
    """A size attribute with which a module's forward reshapes its tensors, and which changes with the sharding.

    Attributes:
        module: Name of the module.
        attribute: Name of the attribute.
        block: Block whose units or features it counts.
        counts: "units" (heads) or "features".
        divisor: Block by whose units the number is divided (query heads per key-value head), optional.
    """

    module: str
    attribute: str
    block: Block
    counts: Literal["units", "features"] = "units"
    divisor: Block | None = None

    def apply(self, model: nn.Module, num_ranks: int, rank: int) -> None:
        """Set the attribute to its value on a rank."""
        setattr(model.get_submodule(self.module), self.attribute, self.local_value(num_ranks, rank))

    def local_value(self, num_ranks: int, rank: int) -> int:
        """Return the attribute's value on a rank."""
        held = units_of_rank(self.block, num_ranks, rank)
        value = held.stop - held.start
        if self.counts == "features":
            value *= self.block.unit_size
        if self.divisor is None:
            return value
        divisor = units_of_rank(self.divisor, num_ranks, rank)
        return value // (divisor.stop - divisor.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedArgument:
    """A forward argument with a value per head, which is narrowed to a rank's heads.

    Attributes:
        module: Name of the module.
        argument: Name of the argument of its forward.
        dim: Dimension of the heads, possibly flattened with preceding ones (batch * heads). Tensors whose size is not a
            multiple of the number of heads, such as 1, are unchanged.
        block: Block of the heads.
    """

    module: str
    argument: str
    dim: int
    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelPlan:
    """Plan of a model for tensor and sequence parallelism.

    Attributes:
        entries: Entries in the order of the model's modules.
        attributes: Size attributes to change.
        arguments: Forward arguments to shard.
        stacks: Names of the layers of each stack, in execution order.
        all_token_blocks: Modules in their layers that compute all tokens on each rank, if the sequence is sharded over
            the tensor-parallel ranks.
        divided_stacks: Those of them that run on blocks of activations on a grid of ranks.
        handovers: Neighbors in a stack that are in two chunks of a pipeline, between which this rank's tokens travel.
        source: Description of the plan's source.
        notes: Notes for the user, such as what is not sharded and why.
        is_derived: Whether it was derived from the module graph, so that users should review it.
    """

    entries: tuple[PlannedEntry, ...] = ()
    attributes: tuple[AttributeChange, ...] = ()
    arguments: tuple[ShardedArgument, ...] = ()
    stacks: tuple[tuple[str, ...], ...] = ()
    all_token_blocks: tuple[str, ...] = ()
    divided_stacks: tuple[tuple[str, ...], ...] = ()
    handovers: tuple[tuple[str, str], ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()
    is_derived: bool = False


OPEN_STYLES = frozenset({"colwise", "packed_colwise"})
"""Styles whose output stays sharded."""
CLOSING_STYLES = frozenset({"rowwise", "packed_rowwise"})
"""Styles with a sharded input and a reduced output."""
COLUMN_STYLES = OPEN_STYLES | {"colwise_gather_output"}
ROW_STYLES = CLOSING_STYLES | {"rowwise_split_input"}
VOCABULARY_STYLES = frozenset({"vocab", "vocab_head"})
FEATURE_STYLES = frozenset({"embedding_colwise", "embedding_colwise_gather_output"})
"""Styles of embeddings that are sharded over features."""
SHARDED_STYLES = COLUMN_STYLES | ROW_STYLES | VOCABULARY_STYLES | FEATURE_STYLES
"""Styles that shard a weight."""
STYLES = SHARDED_STYLES | {
    *("all_reduce", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts"),
    *("replicated", "replicated_with_grad_allreduce", "sequence"),
}
"""All styles; see `Style`."""

_STYLE_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "embedding_rowwise": "vocab",
    "replicate": "replicated",
    "rowwise_rep": "rowwise_split_input",
    "sequence_parallel": "sequence",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPlan:
    """A plan as its source gives it.

    Attributes:
        styles: Styles of modules and bare parameters by name, in the model's order.
        source: Description of the source.
        is_user_plan: Whether a user wrote it.
        is_derived: Whether it was derived from the module graph.
        attributes: Size attributes to change that do not follow from the styles.
        arguments: Arguments to shard that do not follow from the styles.
        siblings: Groups of column-parallel modules that read the same input, if the source provides them.
        notes: Notes for the user.
        reasons: Reasons of styles, by name.
    """

    styles: Mapping[str, Style]
    source: str
    is_user_plan: bool = False
    is_derived: bool = False
    attributes: tuple[AttributeChange, ...] = ()
    arguments: tuple[ShardedArgument, ...] = ()
    siblings: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def read_style(name: str, given: object) -> Style:
    """Parse the style that a plan gives to a pattern.

    Args:
        name: The pattern, for messages.
        given: Name of a style, with ":" and the number of equal blocks after a packed one; or a `Style`.

    Raises:
        ConfigError: The style is unknown or invalid.
    """
    style = Style(given) if isinstance(given, str) else given
    if not isinstance(style, Style):
        raise ConfigError(
            f"the plan has {given!r} for {name!r}, which is not a style: write the name of one, such as 'colwise', or a"
            " Style(name, blocks=...)"
        )
    word, colon, count = style.name.partition(":")
    word = _STYLE_ALIASES.get(word, word)
    if word not in STYLES:
        raise ConfigError(
            f"the plan has the unknown style {style.name!r} for {name!r}: choose one of {', '.join(sorted(STYLES))}"
        )
    if not colon:
        return replace(style, name=word)
    if not word.startswith("packed_") or not count.isdigit() or int(count) < 1:
        raise ConfigError(
            f"the plan has the style {given!r} for {name!r}: only packed_colwise and packed_rowwise take a number of"
            " blocks, such as 'packed_colwise:3'"
        )
    return replace(style, name=word, num_blocks=int(count))


def reason_of(given: object) -> str:
    """Return the reason that the value of a plan carries, as those of `booster.auto_parallel` do, or ""."""
    reason = getattr(given, "reason", "")
    return reason if isinstance(reason, str) else ""


_Value = TypeVar("_Value")


def generalize(name: str) -> str:
    """Return a module's name with its indices replaced by `*`, the pattern of all layers like it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def module_order(model: nn.Module) -> Callable[[str], float]:
    """Return the sort key of names of modules and parameters in the model's order; parameters follow their module."""
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return lambda name: order.get(name, order.get(name.rpartition(".")[0], 0) + 0.5)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]*"), name) is not None


def match_names(
    plan: Mapping[str, _Value], names: Iterable[str], prefix: str = ""
) -> tuple[dict[str, _Value], list[str]]:
    """Match module names with the patterns of a plan.

    A pattern may omit the name of the base model (`model.`), or contain it where the model has none. If several
    patterns match a name, the one with fewer stars wins, and among equals the last one.

    Args:
        plan: Values by pattern.
        names: Names of all modules, in order.
        prefix: Name of the base model in a model with a head; optional, defaults to unknown.

    Returns:
        The values of matching names, in the names' order; and the patterns that match nothing.
    """
    names = list(names)
    found: dict[str, tuple[int, _Value]] = {}
    unmatched = []
    for pattern, value in plan.items():
        hits = _hits(pattern, names, prefix)
        if not hits:
            unmatched.append(pattern)
        num_stars = pattern.count("*")
        for name in hits:
            if name not in found or num_stars <= found[name][0]:
                found[name] = (num_stars, value)
    return {name: found[name][1] for name in names if name in found}, unmatched


def _hits(pattern: str, names: list[str], prefix: str) -> list[str]:
    candidates = [pattern, f"{prefix}.{pattern}" if prefix else f"*.{pattern}"]
    if prefix and pattern.startswith(f"{prefix}."):
        candidates.append(pattern.removeprefix(f"{prefix}."))
    for spelling in candidates:
        if hits := [name for name in names if name and matches(spelling, name)]:
            return hits
    return []


def feature_sizes(module: nn.Module) -> tuple[int, int]:
    """Return a linear layer's number of input and of output features."""
    weight = module.get_parameter("weight")
    first, second = weight.shape
    return (first, second) if is_transposed(module) else (second, first)


def split_dim(module: nn.Module, style: str) -> int:
    """Return the dimension of a linear layer's or an embedding's weight that a style shards."""
    if style.startswith("embedding_colwise"):
        return 1
    is_by_rows = style in ROW_STYLES
    return int(is_by_rows != is_transposed(module))
