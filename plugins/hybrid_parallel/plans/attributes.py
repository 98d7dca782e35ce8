"""Find the size attributes of attentions that change with tensor parallelism."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from booster.plugins.hybrid_parallel.plans.heads import Attention
from booster.plugins.hybrid_parallel.plans.plan import AttributeChange
from booster.plugins.hybrid_parallel.tensor_parallel.splits import Block

__all__ = ["head_attributes"]

_NUM_QUERY = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_q_heads", "heads", "nhead", "h")
_NUM_KEY_VALUE = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_PER_GROUP = ("num_key_value_groups", "num_kv_groups", "n_rep")
_NUM_FEATURES = (
    "all_head_size",
    "inner_dim",
    "split_size",
    "embed_dim",
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "width",
)
_SHAPING = frozenset(("view", "reshape", "split", "unflatten", "expand", "chunk", "new_zeros", "zeros"))


def head_attributes(
    model: nn.Module, attentions: Mapping[str, Attention], blocks: Mapping[str, tuple[Block, ...]]
) -> Iterator[AttributeChange]:
    """Yield the attributes of attentions that have to be set to a rank's local sizes.

    All numbers of heads are changed. Numbers of features are changed only if the attention's code reshapes or splits
    tensors with them, as they may also be the size of its unsharded input.

    Args:
        model: The user's model.
        attentions: Attentions sharded by heads, by name.
        blocks: Blocks of every sharded module, by name.
    """
    for name, attention in attentions.items():
        module = model.get_submodule(name)
        query, key_value = _head_blocks(attention, _attention_blocks(attention, blocks))
        yield from _changes(module, name, _NUM_QUERY, query, attention.num_query)
        yield from _changes(module, name, _NUM_KEY_VALUE, key_value, attention.num_key_value)
        per_group = attention.num_query // attention.num_key_value
        for attribute in _present(module, _PER_GROUP, per_group):
            yield AttributeChange(module=name, attribute=attribute, block=query, divisor=key_value)
        shaping = _shape_attributes(*_sources(type(module)))
        for attribute in _present(module, _NUM_FEATURES, query.size):
            if attribute in shaping:
                yield AttributeChange(module=name, attribute=attribute, block=query, counts="features")


def _attention_blocks(attention: Attention, blocks: Mapping[str, tuple[Block, ...]]) -> list[Block]:
    prefix = f"{attention.name}." if attention.name else ""
    return [block for name, found in blocks.items() if name.startswith(prefix) for block in found]


def _head_blocks(attention: Attention, blocks: Iterable[Block]) -> tuple[Block, Block]:
    """Return the blocks of query and of key-value heads; the head size is 1 if unknown."""
    num_query, num_key_value = attention.num_query, attention.num_key_value
    # The smallest, because query projections may also contain a gate per head.
    size = min((one.unit_size for one in blocks if one.num_units == num_query), default=1)
    return attention.query_block(size * num_query), attention.key_value_block(size * num_key_value)


def _changes(
    module: nn.Module, name: str, attributes: tuple[str, ...], block: Block, number: int
) -> Iterator[AttributeChange]:
    for attribute in _present(module, attributes, number):
        yield AttributeChange(module=name, attribute=attribute, block=block)


def _present(module: nn.Module, attributes: tuple[str, ...], number: int) -> list[str]:
    values = vars(module)
    return [name for name in attributes if type(values.get(name)) is int and values[name] == number]


def _sources(cls: type[nn.Module]) -> list[str]:
    found = []
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        with contextlib.suppress(OSError, TypeError):
            found.append(textwrap.dedent(inspect.getsource(base)))
    return found


@functools.lru_cache(maxsize=256)
def _shape_attributes(*sources: str) -> frozenset[str]:
    """Return the attributes of `self` in arguments of view, reshape, split and similar calls of these classes."""
    found: set[str] = set()
    for source in sources:
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and _function_name(call) in _SHAPING:
                found.update(_self_attributes(call))
    return frozenset(found)


def _function_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _self_attributes(call: ast.Call) -> Iterator[str]:
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        for node in ast.walk(argument):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr
