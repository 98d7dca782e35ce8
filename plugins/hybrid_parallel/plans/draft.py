"""A plan as its source gives it, before heads, ties and regions are worked out: which module has which style."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.plan import ArgumentSplit, AttributeChange, Style

__all__ = ["STYLES", "Draft", "read_style"]

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
"""See Note [Plans]."""

_OTHER_NAMES = {
    "colwise_rep": "colwise_gather_output",
    "embedding_rowwise": "vocab",
    "replicate": "replicated",
    "rowwise_rep": "rowwise_split_input",
    "sequence_parallel": "sequence",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a source says of a model.

    Attributes:
        styles: Of modules and bare parameters, by name, in the model's order.
        source: Where it comes from, as a sentence.
        is_users: A user wrote it, so that its mistakes are theirs.
        is_derived: It was derived from the model, of whose code nothing else is known.
        attributes: Numbers to change that can't be told from the styles.
        arguments: Tensors to cut that can't be told from the styles.
        siblings: Column-parallel modules that read the same input, where the source knows; else their parents tell.
        notes: What the user should know.
    """

    styles: Mapping[str, Style]
    source: str
    is_users: bool = False
    is_derived: bool = False
    attributes: tuple[AttributeChange, ...] = ()
    arguments: tuple[ArgumentSplit, ...] = ()
    siblings: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def read_style(name: str, given: object) -> Style:
    """Reads what a plan says of a pattern.

    Args:
        name: The pattern, for messages.
        given: A style's name, with ":" and a number of equal blocks behind a packed one; or a `Style`.

    Raises:
        ConfigError: There is no such style.
    """
    style = Style(given) if isinstance(given, str) else given
    if not isinstance(style, Style):
        raise ConfigError(
            f"the plan has {given!r} for {name!r}, which is no style: write the name of one, such as 'colwise', or a"
            " Style(name, blocks=...)"
        )
    word, colon, count = style.name.partition(":")
    word = _OTHER_NAMES.get(word, word)
    if word not in STYLES:
        raise ConfigError(
            f"the plan has the style {style.name!r} for {name!r}, which is not known: choose one of"
            f" {', '.join(sorted(STYLES))}"
        )
    if not colon:
        return replace(style, name=word)
    if not word.startswith("packed_") or not count.isdigit() or int(count) < 1:
        raise ConfigError(
            f"the plan has the style {given!r} for {name!r}: only packed_colwise and packed_rowwise take a number of"
            " blocks, such as 'packed_colwise:3'"
        )
    return replace(style, name=word, num_blocks=int(count))
