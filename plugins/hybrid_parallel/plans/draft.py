"""Partial plans: the styles of modules, before heads, tied weights and regions are resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.plan import AttributeChange, ShardedArgument, Style

__all__ = ["STYLES", "PartialPlan", "read_style"]

STYLES = frozenset(
    {
        "all_reduce",
        "colwise",
        "colwise_gather_output",
        "embedding_colwise",
        "embedding_colwise_gather_output",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "packed_colwise",
        "packed_rowwise",
        "replicated",
        "replicated_with_grad_allreduce",
        "rowwise",
        "rowwise_split_input",
        "sequence",
        "vocab",
        "vocab_head",
    }
)
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
        is_users: Whether a user wrote it.
        is_derived: Whether it was derived from the module graph.
        attributes: Size attributes to change that do not follow from the styles.
        arguments: Arguments to shard that do not follow from the styles.
        siblings: Groups of column-parallel modules that read the same input, if the source provides them.
        notes: Notes for the user.
    """

    styles: Mapping[str, Style]
    source: str
    is_user_plan: bool = False
    is_derived: bool = False
    attributes: tuple[AttributeChange, ...] = ()
    arguments: tuple[ShardedArgument, ...] = ()
    siblings: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


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
