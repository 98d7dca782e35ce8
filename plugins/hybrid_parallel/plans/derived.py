"""Plans derived from the module graph: linear layers verified to compute the same when sharded. See Note [Probing]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.attributes import head_attributes
from booster.plugins.hybrid_parallel.plans.draft import Draft
from booster.plugins.hybrid_parallel.plans.features import feature_sizes
from booster.plugins.hybrid_parallel.plans.heads import Attention
from booster.plugins.hybrid_parallel.plans.patterns import generalized
from booster.plugins.hybrid_parallel.plans.plan import AttributeChange, Style
from booster.plugins.hybrid_parallel.plans.probing import SIZES_OF_THE_WHOLE, Probe, Split, module_kind, probe
from booster.plugins.hybrid_parallel.plans.stacks import find_stacks
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear
from booster.plugins.hybrid_parallel.tensor_parallel.splits import Block

__all__ = ["derived_draft"]

_MAX_COLUMNS = 4  # layers that read one input: query, key, value, and a gate
_SHARED = "its weight is tied to another module's ('vocab' and 'vocab_head' in a plan shard embedding and head)"
_NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_q_heads", "heads", "nhead", "h")


def derived_draft(model: nn.Module, tp_size: int = 2) -> Draft:
    """Find column-row pairs of linear layers, and attentions by their heads.

    Every module that holds linear layers is run alone on random input, to verify that shards compute the same.

    Args:
        model: Any model, possibly on the meta device. It is not changed.
        tp_size: Number of ranks to verify, among others.

    Raises:
        ConfigError: No layer can be sharded; the message contains the reasons.
    """
    search = _Search(model, tp_size)
    for name, module in model.named_modules():
        search.look_into(name, module)
    if not search.styles:
        reasons = "; ".join(search.notes) or "it has no consecutive linear layers"
        raise ConfigError(
            f"no tensor-parallel plan is known for {type(model).__name__}, and none can be derived ({reasons}): give"
            " plan={'pattern of module names': style, ...}, or use tp_size=1"
        )
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return Draft(
        styles=dict(sorted(search.styles.items(), key=lambda item: order[item[0]])),
        source="derived from the model: every sharded layer was run in shards and computes the same",
        is_derived=True,
        attributes=tuple(search.attributes),
        siblings=tuple(search.siblings),
        notes=tuple(search.notes),
    )


class _Search:
    def __init__(self, model: nn.Module, tp_size: int) -> None:
        self._tp_size = tp_size
        self._layers = [layer for stack in find_stacks(model) for layer in stack]
        self._shared = _shared_layers(model)
        self._known: dict[tuple[object, ...], tuple[list[Split], list[str]]] = {}
        self.styles: dict[str, Style] = {}
        self.attributes: list[AttributeChange] = []
        self.siblings: list[tuple[str, ...]] = []
        self.notes: list[str] = []

    def look_into(self, name: str, module: nn.Module) -> None:
        """Find the shardable layers among a module's direct linear children."""
        held = [key for key, child in module.named_children() if is_linear(child)]
        prefix = f"{name}." if name else ""
        free = [key for key in held if f"{prefix}{key}" not in self._shared]
        self._note(name, [key for key in held if key not in free], _SHARED)
        if any(layer.startswith(prefix) for layer in self._layers):
            self._note(name, free, "it is next to full layers of a stack, which are not run to verify it")
            return
        if len(free) < 2:
            self._note(name, free, "no other linear layer next to it reads its output")
            return
        kind = module_kind(module, tuple(free))
        if kind not in self._known:
            self._known[kind] = _find_splits(module, free, self._tp_size)
        splits, reasons = self._known[kind]
        for split in splits:
            self._add(prefix, split)
        found = {key for split in splits for key in (*split.columns, split.row)}
        reason = "; ".join(reasons) or "no other linear layer reads its output in shards"
        self._note(name, [key for key in free if key not in found], reason)

    def _add(self, prefix: str, split: Split) -> None:
        for key, blocks in split.columns.items():
            word = "packed_colwise" if len(blocks) > 1 else "colwise"
            self.styles[f"{prefix}{key}"] = Style(word, blocks)
        self.styles[f"{prefix}{split.row}"] = Style("rowwise", split.row_blocks)
        self.siblings.append(tuple(f"{prefix}{key}" for key in split.columns))
        owner = prefix.removesuffix(".")
        self.attributes.extend(replace(change, module=owner) for change in split.attributes)

    def _note(self, name: str, keys: list[str], reason: str) -> None:
        for key in keys:
            note = f"{generalized(f'{name}.{key}' if name else key)} is not sharded: {reason}"
            if note not in self.notes:
                self.notes.append(note)


def _find_splits(module: nn.Module, held: list[str], tp_size: int) -> tuple[list[Split], list[str]]:
    """Return the verified splits of a module's direct linear layers, and the reasons if there are none."""
    probed = probe(module, tp_size)
    if isinstance(probed, str):
        return [], [probed]
    order = [key for key in probed.calls if key in held]
    found: list[Split] = []
    start = 0
    for index in range(1, len(order)):
        for first in range(max(start, index - _MAX_COLUMNS), index):
            split = _proven(module, probed, order[first:index], order[index])
            if split is not None:
                found.append(split)
                start = index + 1
                break
    if found or len(order) > 1:
        differs = f"it raises when it is run in shards; {SIZES_OF_THE_WHOLE}"
        if not probed.has_raised_for_sizes:
            differs = "their results differ when they are sharded"
        return found, [] if found else [differs]
    return found, ["the module uses their weights without calling them, or calls them more than once"]


def _proven(module: nn.Module, probed: Probe, columns: list[str], row: str) -> Split | None:
    if not _reads_alike(probed, columns):
        return None
    return next((split for split in _candidates(module, probed, columns, row) if probed.proves(split)), None)


def _reads_alike(probed: Probe, columns: list[str]) -> bool:
    first, *others = (probed.calls[key][0] for key in columns)
    return all(other.shape == first.shape and torch.equal(other, first) for other in others)


def _candidates(module: nn.Module, probed: Probe, columns: list[str], row: str) -> Iterator[Split]:
    """Yield candidate splits of layers: by single features, by heads, with several blocks in one layer."""
    inputs = feature_sizes(module.get_submodule(row))[0]
    outputs = {key: feature_sizes(module.get_submodule(key))[1] for key in columns}
    if all(size % inputs == 0 for size in outputs.values()):
        single = {key: (Block(num_units=inputs),) * (size // inputs) for key, size in outputs.items()}
        yield Split(columns=single, row=row, row_blocks=(Block(num_units=inputs),))
    for num_query, num_key_value in _head_counts(module, probed, inputs, outputs):
        yield from _candidates_by_heads(module, row, inputs, outputs, num_query, num_key_value)


def _head_counts(module: nn.Module, probed: Probe, inputs: int, outputs: dict[str, int]) -> list[tuple[int, int]]:
    """Return the numbers of query and key-value heads that an attention may have, the likely ones first."""
    own = [value for name in _NUM_HEADS if type(value := vars(module).get(name)) is int and value > 1]
    seen = sorted(set(probed.num_heads), reverse=True)
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
) -> Iterator[Split]:
    if inputs % num_query or num_query < 2:
        return
    attention = Attention(name="", num_query=num_query, num_key_value=num_key_value)
    head_size = inputs // num_query
    query = attention.query_block(inputs)
    key_value = attention.key_value_block(head_size * num_key_value)
    of_size = {inputs: (query,), inputs + 2 * key_value.size: (query, key_value, key_value)}
    of_size.setdefault(key_value.size, (key_value,))
    of_size.setdefault(2 * key_value.size, (key_value, key_value))
    if all(size in of_size for size in outputs.values()):
        columns = {key: of_size[size] for key, size in outputs.items()}
        yield _with_attributes(module, attention, Split(columns=columns, row=row, row_blocks=(query,)))
    if len(outputs) == 1:  # fused projection with the query, key and value features of each group consecutive
        key, size = next(iter(outputs.items()))
        groups = Block(num_units=num_key_value, unit_size=size // num_key_value)
        if groups.size == size:
            yield _with_attributes(module, attention, Split(columns={key: (groups,)}, row=row, row_blocks=(query,)))


def _with_attributes(module: nn.Module, attention: Attention, split: Split) -> Split:
    blocks = {**split.columns, split.row: split.row_blocks}
    return replace(split, attributes=tuple(head_attributes(module, {"": attention}, blocks)))


def _shared_layers(model: nn.Module) -> set[str]:
    """Return the modules whose weight is tied to another module's, and those registered under several names."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            holders.setdefault(id(weight), []).append(name)
    return {name for names in holders.values() if len(names) > 1 for name in names}
