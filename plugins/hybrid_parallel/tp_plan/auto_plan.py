"""Plans derived from the module graph, of linear layers with verified sharded results; see Note [Equivalence check]."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from booster.core.layer_stacks import find_stacks
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block

from .attention_heads import NUM_KEY_VALUE_NAMES, NUM_QUERY_NAMES, PER_GROUP_NAMES, Attention
from .equivalence_check import (
    UNSHARDED_SIZES_HINT,
    EquivalenceCheck,
    SplitCandidate,
    module_signature,
    run_equivalence_check,
)
from .plan import AttributeChange, PartialPlan, Style, feature_sizes, generalize, module_order

_NUM_FEATURES_NAMES = (
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
        num_query, num_key_value = attention.num_query, attention.num_key_value
        prefix = f"{name}." if name else ""
        own = [block for key, found in blocks.items() if key.startswith(prefix) for block in found]
        # The smallest, because query projections may also contain a gate per head.
        head_size = min((block.unit_size for block in own if block.num_units == num_query), default=1)
        query = attention.query_block(head_size * num_query)
        key_value = attention.key_value_block(head_size * num_key_value)
        for attribute in _present(module, NUM_QUERY_NAMES, num_query):
            yield AttributeChange(module=name, attribute=attribute, block=query)
        for attribute in _present(module, NUM_KEY_VALUE_NAMES, num_key_value):
            yield AttributeChange(module=name, attribute=attribute, block=key_value)
        for attribute in _present(module, PER_GROUP_NAMES, num_query // num_key_value):
            yield AttributeChange(module=name, attribute=attribute, block=query, divisor=key_value)
        shaping = _shape_attributes(*_sources(type(module)))
        for attribute in _present(module, _NUM_FEATURES_NAMES, query.size):
            if attribute in shaping:
                yield AttributeChange(module=name, attribute=attribute, block=query, counts="features")


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
    """Return the attributes of `self` in arguments of view, reshape, split and similar calls of these classes.

    An argument may be a local variable: then those of the values that it is given.
    """
    found: set[str] = set()
    for source in sources:
        nodes = list(ast.walk(ast.parse(source)))
        values: dict[str, list[ast.expr]] = {}
        for node in nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        values.setdefault(target.id, []).append(node.value)
        for call in nodes:
            if not isinstance(call, ast.Call):
                continue
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if function not in _SHAPING:
                continue
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                name = argument.value if isinstance(argument, ast.Starred) else argument
                given = values.get(name.id, []) if isinstance(name, ast.Name) else []
                for node in (inner for one in (argument, *given) for inner in ast.walk(one)):
                    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                        found.add(node.attr)
    return frozenset(found)


_MAX_COLUMNS = 4  # layers that read one input: query, key, value, and a gate
_TIED_REASON = "its weight is tied to another module's ('vocab' and 'vocab_head' in a plan shard embedding and head)"


def derive_plan(model: nn.Module, tp_size: int = 2) -> PartialPlan:
    """Find column-row pairs of linear layers, and attentions by their heads.

    Every module that holds linear layers is run alone on random input, to verify that shards compute the same.

    Args:
        model: Any model, possibly on the meta device. It is not changed.
        tp_size: Number of ranks to verify, among others.

    Raises:
        ConfigError: No layer can be sharded; the message contains the first reason.
    """
    search = _PlanSearch(model, tp_size)
    for name, module in model.named_modules():
        search.visit(name, module)
    if not search.styles:
        notes = sorted(search.notes, key=lambda note: "*" not in note)  # those of repeated layers first
        first, *others = notes or ["it has no consecutive linear layers"]
        reason = textwrap.shorten(first, 90, placeholder="...") + (f"; and {len(others)} more" if others else "")
        raise ConfigError(
            f"no tensor-parallel plan is known for {type(model).__name__}, and none can be derived ({reason}): give"
            " plan={'pattern of module names': style, ...}, or use tp_size=1"
        )
    _check_partial_gradients(model, search.styles)
    return PartialPlan(
        styles={name: search.styles[name] for name in sorted(search.styles, key=module_order(model))},
        source="derived from the model: every sharded layer was run in shards and computes the same",
        is_derived=True,
        attributes=tuple(search.attributes),
        siblings=tuple(search.siblings),
        notes=tuple(search.notes),
    )


def _check_partial_gradients(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Check that parameters of which each rank has a part of the gradient are not used in other places, too.

    Raises:
        ConfigError: One is, where each rank has all of its gradient.
    """

    def is_partial(name: str) -> bool:
        style = styles.get(name) or styles.get(name.rpartition(".")[0])
        return style is not None and style.name == "replicated_with_grad_allreduce"

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        within = [name for name in shared if is_partial(name)]
        outside = [name for name in shared if not is_partial(name)]
        if within and outside:
            raise ConfigError(
                f"{within[0]!r}, which is used on sharded features, is also {outside[0]!r}, which is used on all of"
                " them: tensor parallelism would add up the second use's gradient from all ranks. Give each place a"
                " module of its own, or a plan={'pattern of module names': style, ...} that leaves these layers whole"
            )


def derive_splits(model: nn.Module, owner: str, layers: Collection[str], tp_size: int) -> PartialPlan | None:
    """Find how layers beside each other are sharded, by a run of the module that holds them.

    Args:
        model: Any model, possibly on the meta device. It is not changed.
        owner: Name of the module.
        layers: Names of the layers, direct children of the module, all of which are to be sharded.
        tp_size: Number of ranks to verify, among others.

    Returns:
        Their styles, and attributes to change; None if the module can't be run, or shards do not compute the same.
    """
    module, prefix = model.get_submodule(owner), f"{owner}." if owner else ""
    if any(layer.startswith(prefix) for stack in find_stacks(model) for layer in stack):
        return None  # it contains full layers of a stack, which are not run
    search = _PlanSearch(model, tp_size)
    splits, _ = _find_splits(module, [name.removeprefix(prefix) for name in layers], tp_size)
    for split in splits:
        search.add(prefix, split)
    is_complete = {name for name, style in search.styles.items() if not style.name.startswith("repl")} == set(layers)
    return PartialPlan(styles=search.styles, attributes=tuple(search.attributes), source="") if is_complete else None


class _PlanSearch:
    def __init__(self, model: nn.Module, tp_size: int) -> None:
        self._tp_size = tp_size
        self._layers = [layer for stack in find_stacks(model) for layer in stack]
        self._tied = _tied_layers(model)
        self._known: dict[tuple[object, ...], tuple[list[SplitCandidate], list[str]]] = {}
        self.styles: dict[str, Style] = {}
        self.attributes: list[AttributeChange] = []
        self.siblings: list[tuple[str, ...]] = []
        self.notes: list[str] = []

    def visit(self, name: str, module: nn.Module) -> None:
        """Find the shardable layers among a module's direct linear children."""
        held = [key for key, child in module.named_children() if is_linear(child)]
        prefix = f"{name}." if name else ""
        free = [key for key in held if f"{prefix}{key}" not in self._tied]
        self._note(name, [key for key in held if key not in free], _TIED_REASON)
        if any(layer.startswith(prefix) for layer in self._layers):
            self._note(name, free, "it is next to full layers of a stack, which are not run to verify it")
            return
        if len(free) < 2:
            self._note(name, free, "no other linear layer next to it reads its output")
            return
        kind = module_signature(module, tuple(free))
        if kind not in self._known:
            self._known[kind] = _find_splits(module, free, self._tp_size)
        splits, reasons = self._known[kind]
        for split in splits:
            self.add(prefix, split)
        found = {key for split in splits for key in (*split.columns, split.row)}
        reason = "; ".join(reasons) or "no other linear layer reads its output in shards"
        self._note(name, [key for key in free if key not in found], reason)

    def add(self, prefix: str, split: SplitCandidate) -> None:
        for key, blocks in split.columns.items():
            word = "packed_colwise" if len(blocks) > 1 else "colwise"
            self.styles[f"{prefix}{key}"] = Style(word, blocks)
        self.styles[f"{prefix}{split.row}"] = Style("rowwise", split.row_blocks)
        for key in split.partial:
            self.styles[f"{prefix}{key}"] = Style("replicated_with_grad_allreduce")
        self.siblings.append(tuple(f"{prefix}{key}" for key in split.columns))
        owner = prefix.removesuffix(".")
        self.attributes.extend(replace(change, module=owner) for change in split.attributes)

    def _note(self, name: str, keys: list[str], reason: str) -> None:
        for key in keys:
            note = f"{generalize(f'{name}.{key}' if name else key)} is not sharded: {reason}"
            if note not in self.notes:
                self.notes.append(note)


def _find_splits(module: nn.Module, held: list[str], tp_size: int) -> tuple[list[SplitCandidate], list[str]]:
    """Return the verified splits of a module's direct linear layers, and the reasons if there are none."""
    check = run_equivalence_check(module, tp_size)
    if isinstance(check, str):
        return [], [check]
    order = [key for key in check.calls if key in held]
    found: list[SplitCandidate] = []
    start = 0
    for index in range(1, len(order)):
        for first in range(max(start, index - _MAX_COLUMNS), index):
            split = _find_equivalent(module, check, order[first:index], order[index])
            if split is not None:
                found.append(split)
                start = index + 1
                break
    if found or len(order) > 1:
        reason = f"it raises when it is run in shards; {UNSHARDED_SIZES_HINT}"
        if not check.had_size_error:
            reason = "their results differ when they are sharded"
        return found, [] if found else [reason]
    return found, ["the module uses their weights without calling them, or calls them more than once"]


def _find_equivalent(module: nn.Module, check: EquivalenceCheck, columns: list[str], row: str) -> SplitCandidate | None:
    first, *others = (check.calls[key][0] for key in columns)
    if not all(other.shape == first.shape and torch.equal(other, first) for other in others):
        return None  # they do not read the same input
    for split in _candidates(module, check, columns, row):
        if check.is_equivalent(split) and (names := check.partial_gradients(split)) is not None:
            return replace(split, partial=names)
    return None


def _candidates(module: nn.Module, check: EquivalenceCheck, columns: list[str], row: str) -> Iterator[SplitCandidate]:
    """Yield candidate splits of layers: by single features, by heads, with several blocks in one layer."""
    inputs = feature_sizes(module.get_submodule(row))[0]
    outputs = {key: feature_sizes(module.get_submodule(key))[1] for key in columns}
    if all(size % inputs == 0 for size in outputs.values()):
        single = {key: (Block(num_units=inputs),) * (size // inputs) for key, size in outputs.items()}
        yield SplitCandidate(columns=single, row=row, row_blocks=(Block(num_units=inputs),))
    for num_query, num_key_value in _head_counts(module, check, inputs, outputs):
        yield from _candidates_by_heads(module, row, inputs, outputs, num_query, num_key_value)


def _head_counts(
    module: nn.Module, check: EquivalenceCheck, inputs: int, outputs: dict[str, int]
) -> list[tuple[int, int]]:
    """Return the numbers of query and key-value heads that an attention may have, the likely ones first."""
    own = [value for name in NUM_QUERY_NAMES if type(value := vars(module).get(name)) is int and value > 1]
    seen = sorted(set(check.num_heads), reverse=True)
    queries = dict.fromkeys([*own, *seen])
    numbers = [number for number in vars(module).values() if type(number) is int and number > 0]
    pairs: list[tuple[int, int]] = []
    for query in queries:
        by_size = [size * query // inputs for size in outputs.values() if size * query >= inputs]
        keys = (query, *seen, *by_size, *numbers)
        pairs.extend((query, key) for key in keys if key <= query and query % key == 0)
    return list(dict.fromkeys(pairs))


def _candidates_by_heads(
    module: nn.Module, row: str, inputs: int, outputs: dict[str, int], num_query: int, num_key_value: int
) -> Iterator[SplitCandidate]:
    if inputs % num_query or num_query < 2:
        return
    attention = Attention(name="", num_query=num_query, num_key_value=num_key_value)
    head_size = inputs // num_query
    query = attention.query_block(inputs)
    key_value = attention.key_value_block(head_size * num_key_value)
    blocks_by_size = {inputs: (query,), inputs + 2 * key_value.size: (query, key_value, key_value)}
    blocks_by_size.setdefault(key_value.size, (key_value,))
    blocks_by_size.setdefault(2 * key_value.size, (key_value, key_value))
    columns: list[dict[str, tuple[Block, ...]]] = []
    if all(size in blocks_by_size for size in outputs.values()):
        columns.append({key: blocks_by_size[size] for key, size in outputs.items()})
    if len(outputs) == 1:  # fused projection with the query, key and value features of each group consecutive
        key, size = next(iter(outputs.items()))
        groups = Block(num_units=num_key_value, unit_size=size // num_key_value)
        if groups.size == size:
            columns.append({key: (groups,)})
    for blocks in columns:
        attributes = tuple(head_attributes(module, {"": attention}, {**blocks, row: (query,)}))
        yield SplitCandidate(columns=blocks, row=row, row_blocks=(query,), attributes=attributes)


def _tied_layers(model: nn.Module) -> set[str]:
    """Return the modules whose weight is tied to another module's, and those registered under several names."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")  # no parametrization's, which may change state when it is read
        if weight is not None:
            holders.setdefault(id(weight), []).append(name)
    return {name for names in holders.values() if len(names) > 1 for name in names}
