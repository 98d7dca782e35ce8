"""Blocks of sharded dimensions: heads in attentions, single features elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block

from .plan import OPEN_STYLES, ROW_STYLES, VOCABULARY_STYLES, Style, feature_sizes

# torch's grouped matmul of all experts' weights requires rows of multiples of 16 bytes.
_GROUPED_MATMUL_MULTIPLE = 8

_QUERY = frozenset(("q_proj", "query", "q", "wq", "q_attn", "to_q", "q_b_proj", "query_proj", "q_lin", "linear_q"))
_KEY = frozenset(("k_proj", "key", "k", "wk", "to_k", "key_proj", "k_lin", "linear_k"))
_VALUE = frozenset(("v_proj", "value", "v", "wv", "to_v", "value_proj", "v_lin", "linear_v"))
_FUSED = frozenset(("query_key_value", "qkv_proj", "c_attn", "qkv", "wqkv", "in_proj", "to_qkv", "qkv_linear"))

# usual names of an attention's attributes
NUM_QUERY_NAMES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_q_heads", "heads", "nhead", "h")
NUM_KEY_VALUE_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
PER_GROUP_NAMES = ("num_key_value_groups", "num_kv_groups", "n_rep")
_HEAD_SIZE_NAMES = ("head_dim", "attention_head_size", "key_value_proj_dim", "d_head", "head_size")

# Note [Attention heads]
# The modules of an attention are recognized by name, because nothing else indicates how a linear layer's outputs are
# reshaped: the parent of a `q_proj` (or any of the names above) that the plan shards is an attention. Its number of
# heads comes from one of the usual attributes of the module, or else of its configuration. All other sharded modules in
# it have the same heads. Its output projection is in the module, or in a sibling as in BERT.


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The heads of an attention. See Note [Attention heads].

    Attributes:
        name: Name of the module that holds the projections.
        num_query: Number of query heads.
        num_key_value: Number of key-value heads.
    """

    name: str
    num_query: int
    num_key_value: int

    def query_block(self, size: int) -> Block:
        """Return the block of `size` features of query heads."""
        groups = None if self.num_key_value == self.num_query else self.num_key_value
        return Block(num_units=self.num_query, unit_size=size // self.num_query, num_groups=groups)

    def key_value_block(self, size: int) -> Block:
        """Return the block of `size` features of key-value heads."""
        size //= self.num_key_value
        if self.num_key_value == self.num_query:
            return Block(num_units=self.num_query, unit_size=size)
        return Block(
            num_units=self.num_key_value,
            unit_size=size,
            num_query_units=self.num_query,
            num_groups=self.num_key_value,
        )


def owner_of(name: str) -> str:
    """Return the name of a module's parent, skipping wrappers (`q_proj.linear`)."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "linear" and parent.endswith(("_proj", "_lin")):
        return parent.rpartition(".")[0]
    return parent


def role_of(name: str) -> str:
    """Return "query", "key", "value" or "fused" by a module's name, or "" if it is not an input projection."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "linear":  # of a wrapper
        leaf = parent.rpartition(".")[2]
    roles = (("query", _QUERY), ("key", _KEY), ("value", _VALUE), ("fused", _FUSED))
    return next((role for role, names in roles if leaf.lower() in names), "")


def find_attentions(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Attention]:
    """Find the attentions whose projections a plan shards by heads, by module name.

    Raises:
        ConfigError: An attention's number of heads is unknown.
    """
    modules: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        if style.name not in OPEN_STYLES or style.blocks:
            continue
        owner, role = owner_of(name), role_of(name)
        # the projections of an attention may have unusual names
        is_attention = role or (
            "att" in owner.rpartition(".")[2].lower()
            and first_number(model.get_submodule(owner), NUM_QUERY_NAMES) is not None
        )
        if is_attention:
            modules.setdefault(owner, {})[role] = name
    return {owner: _attention(model, owner, names, styles) for owner, names in modules.items()}


def check_replicated_parameters(
    model: nn.Module, styles: Mapping[str, Style], attentions: Mapping[str, Attention]
) -> None:
    """Check that no parameter with values for all heads stays unsharded in a sharded attention.

    Only for plans that are not verified by running them.

    Raises:
        ConfigError: There is such a parameter.
    """
    for owner, attention in attentions.items():
        sizes = {
            role_of(name): feature_sizes(model.get_submodule(name))[1]
            for name, style in styles.items()
            if owner_of(name) == owner and style.name == "colwise" and role_of(name)
        }
        for own_name, parameter in model.get_submodule(owner).named_parameters():
            name = f"{owner}.{own_name}" if owner else own_name
            module_name = name.rpartition(".")[0]
            if name not in styles and module_name not in styles and _spans_all_heads(name, parameter, attention, sizes):
                raise ConfigError(
                    f"the plan shards the {attention.num_query} heads ({attention.num_key_value} of keys and values) of"
                    f" {owner!r}, but not its parameter {name!r} of shape {tuple(parameter.shape)}, which has values"
                    " for all heads, so the forward would combine a rank's heads with those of all: give plan= without"
                    " the layers of this attention, so that it stays unsharded, or use tp_size=1"
                )


def _spans_all_heads(name: str, parameter: torch.Tensor, attention: Attention, sizes: Mapping[str, int]) -> bool:
    """Whether it is the attention's own parameter with a value per head, or a norm over all query or key features."""
    module_name = name.rpartition(".")[0]
    if module_name == attention.name:
        return not {attention.num_query, attention.num_key_value}.difference({1}).isdisjoint(parameter.shape)
    leaf = module_name.rpartition(".")[2].lower()
    if "norm" not in leaf and "ln" not in leaf:
        return False
    role, num_heads = ("query", attention.num_query) if leaf[0] == "q" else ("key", attention.num_key_value)
    return leaf[0] in "qk" and num_heads > 1 and parameter.ndim == 1 and parameter.numel() == sizes.get(role)


def blocks_of(
    name: str, style: Style, shape: tuple[int, ...], dim: int, attentions: Mapping[str, Attention]
) -> tuple[Block, ...]:
    """Return the blocks of a module's sharded dimension.

    Args:
        name: Name of the module or bare parameter.
        style: Style of the module.
        shape: Shape of its weight.
        dim: The sharded dimension.
        attentions: Attentions by name, from `find_attentions`.

    Raises:
        ConfigError: The style's numbers do not divide the dimension.
    """
    size = shape[dim]
    if style.blocks:
        return style.blocks
    if style.num_heads is not None:
        _check_divides(name, size, style.num_heads, "heads")
        return (Block(num_units=style.num_heads, unit_size=size // style.num_heads),)
    if style.name.endswith(("_gather_output", "_split_input")) or style.name in VOCABULARY_STYLES:
        return (Block(num_units=size),)
    attention = _attention_of(name, style, attentions)
    if attention is not None:
        return _blocks_by_heads(name, style, size, attention)
    num_blocks = style.num_blocks or (2 if style.name.startswith("packed_") else 1)
    _check_divides(name, size, num_blocks, "blocks")
    features = size // num_blocks
    unit = _GROUPED_MATMUL_MULTIPLE if len(shape) == 3 and features % _GROUPED_MATMUL_MULTIPLE == 0 else 1
    return (Block(num_units=features // unit, unit_size=unit),) * num_blocks


def _blocks_by_heads(name: str, style: Style, size: int, attention: Attention) -> tuple[Block, ...]:
    role = role_of(name)
    num_query, num_key_value = attention.num_query, attention.num_key_value
    if role == "fused" and style.name == "packed_colwise":
        num_blocks = style.num_blocks or 3
        num_heads = 2 * num_key_value + (num_query if num_blocks == 3 else 0)
        _check_divides(name, size, num_heads, "heads")
        key_value = attention.key_value_block(size // num_heads * num_key_value)
        query = (attention.query_block(size // num_heads * num_query),) if num_blocks == 3 else ()
        return (*query, key_value, key_value)
    if role == "fused":  # the queries, key and value of each group are consecutive
        _check_divides(name, size, num_key_value, "groups of heads")
        return (Block(num_units=num_key_value, unit_size=size // num_key_value),)
    if role in ("key", "value"):
        _check_divides(name, size, num_key_value, "key-value heads")
        return (attention.key_value_block(size),)
    _check_divides(name, size, num_query, "heads")
    return (attention.query_block(size),)


def _attention_of(name: str, style: Style, attentions: Mapping[str, Attention]) -> Attention | None:
    owner = owner_of(name)
    if owner in attentions or style.name not in ROW_STYLES:
        return attentions.get(owner)
    outer = owner.rpartition(".")[0]  # BERT's attention.output.dense belongs to attention.self
    if "att" not in outer.rpartition(".")[2].lower():
        return None
    inside = [one for one_name, one in attentions.items() if one_name.rpartition(".")[0] == outer]
    return inside[0] if len(inside) == 1 else None


def _attention(model: nn.Module, owner: str, names: Mapping[str, str], styles: Mapping[str, Style]) -> Attention:
    module = model.get_submodule(owner)
    config = getattr(module, "config", None)
    layers = {role: model.get_submodule(name) for role, name in names.items() if role}
    sizes = {role: feature_sizes(layer)[1] for role, layer in layers.items()}
    given = next((styles[name].num_heads for role, name in names.items() if role in ("query", "fused")), None)
    num_query = given or first_number(module, NUM_QUERY_NAMES) or first_number(config, NUM_QUERY_NAMES)
    head_size = first_number(module, _HEAD_SIZE_NAMES)
    if num_query is None and head_size and "query" in sizes:
        num_query = sizes["query"] // head_size
    if num_query is None:
        raise ConfigError(
            f"the plan shards the projections of {owner!r}, whose number of heads is unknown (it has no attribute such"
            f" as {NUM_QUERY_NAMES[1]!r}), so heads could be divided between ranks: write Style('colwise',"
            f" num_heads=...) for {', '.join(repr(name) for name in names.values())}"
        )
    num_key_value = _num_key_value(module, config, num_query, sizes, head_size)
    if num_query % num_key_value:
        raise ConfigError(
            f"{owner!r} has {num_query} query heads, which is not a multiple of its {num_key_value} key-value heads:"
            " set num_key_value_heads in the configuration to a divisor of the number of heads"
        )
    return Attention(name=owner, num_query=num_query, num_key_value=num_key_value)


def _num_key_value(
    module: nn.Module, config: object, num_query: int, sizes: Mapping[str, int], head_size: int | None
) -> int:
    if number := first_number(module, NUM_KEY_VALUE_NAMES):
        return number
    if per_group := first_number(module, PER_GROUP_NAMES):
        return num_query // per_group
    if head_size and "fused" in sizes and "query" not in sizes:
        return max(1, (sizes["fused"] // head_size - num_query) // 2)
    if "key" in sizes and "query" in sizes:
        if sizes["key"] == sizes["query"]:
            return num_query
        size = head_size or sizes["query"] // num_query
        return max(1, sizes["key"] // size)
    return first_number(config, NUM_KEY_VALUE_NAMES) or num_query


def first_number(holder: object, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes of a module or configuration that is a positive integer, or None."""
    found = (getattr(holder, name, None) for name in names)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _check_divides(name: str, size: int, num_blocks: int, what: str) -> None:
    if size % num_blocks:
        raise ConfigError(
            f"the plan divides {size} features of {name!r} into {num_blocks} {what}, which is not a divisor: give the"
            " blocks into which the forward splits them, as Style(name, blocks=(Block(...), ...))"
        )
