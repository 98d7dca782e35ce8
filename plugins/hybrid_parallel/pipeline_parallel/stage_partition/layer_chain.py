"""Detection of the layer chain of a model: modules that run in sequence, each on the output of the previous one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from booster.core.layer_stacks import find_stacks
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tp_plan.tables import pretrained_models

from .tracing import Trace, holds_parameters, trace_calls


@dataclass(frozen=True, slots=True)
class ModulePlaces:
    """Where the modules around the layers run, of models in which the order of registration does not tell it.

    Modules are assumed to run in the order of registration, as in nearly all models of transformers, or in that of a
    model's pipeline plan (`_pp_plan`). The table has the exceptions, with names relative to the parent of the layer
    list or to a model of transformers around it.

    Attributes:
        before: Modules that are registered after the layers, and run before the first.
        after: Modules that are registered before the layers, and run after the last.
        sent_on: Modules that run before the layers and whose outputs later layers take besides the output of the
            layer before them: they are sent from stage to stage.
        everywhere: Modules that every stage holds and runs, as its forward reads their weights or their outputs.
        layers: Name of the list of layers; optional, where it is found otherwise.
        overwrites_embeddings: Whether the forward changes the output of a module before the layers in place.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    sent_on: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    layers: str = ""
    overwrites_embeddings: bool = False


_PER_LAYER_INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")

MODULE_PLACES: Mapping[str, ModulePlaces] = {
    "opt": ModulePlaces(before=("project_in",), after=("final_layer_norm", "project_out")),
    **dict.fromkeys(
        ("bart", "mbart", "mvp", "plbart", "led", "blenderbot-small"), ModulePlaces(before=("layernorm_embedding",))
    ),
    "cpmant": ModulePlaces(
        before=("segment_embedding", "input_embedding", "position_bias"), sent_on=("position_bias",)
    ),
    "ctrl": ModulePlaces(overwrites_embeddings=True),
    "gemma3n_text": ModulePlaces(
        before=(*_PER_LAYER_INPUTS, "altup_projections"),
        sent_on=("embed_tokens_per_layer", "per_layer_projection_norm"),
        overwrites_embeddings=True,
    ),
    "gemma4_text": ModulePlaces(
        before=_PER_LAYER_INPUTS, sent_on=("embed_tokens_per_layer", "per_layer_projection_norm")
    ),
    "git": ModulePlaces(before=("visual_projection",)),
    "inkling2_text": ModulePlaces(sent_on=("embed_tokens",)),
    "mobilevit": ModulePlaces(layers="encoder.layer"),
    "mpnet": ModulePlaces(before=("relative_attention_bias",), sent_on=("relative_attention_bias",)),
    "neomme": ModulePlaces(
        before=("value_embeddings",), after=("final_norm",), sent_on=("value_embeddings", "embedding_norm")
    ),
    "perceiver": ModulePlaces(everywhere=("input_preprocessor",)),
    "prophetnet": ModulePlaces(before=("embeddings_layer_norm",)),
    "roformer": ModulePlaces(sent_on=("embed_positions",)),
    "sew-d": ModulePlaces(before=("rel_embeddings", "LayerNorm"), sent_on=("LayerNorm",)),
    "siglip2_vision_model": ModulePlaces(everywhere=("embeddings",)),
    "speecht5": ModulePlaces(before=("embed_positions",), sent_on=("embed_positions",)),
    "swiftformer": ModulePlaces(layers="encoder.network"),
    **dict.fromkeys(("t5gemma", "t5gemma2"), ModulePlaces(after=("norm",))),
    "wav2vec2-conformer": ModulePlaces(before=("embed_positions",), after=("layer_norm",)),
    **dict.fromkeys(("zamba", "zamba2"), ModulePlaces(sent_on=("embed_tokens",))),
}

UNSPLITTABLE: Mapping[str, str] = {
    "albert": "runs one group of layers again and again (num_hidden_layers counts the runs)",
    "hrm_text": "runs its two lists of layers in turn, several times",
    **dict.fromkeys(("flaubert", "xlm"), "has no layers but lists of their parts, attentions and feed-forwards"),
    "ibert": "reads the scales of the embeddings, which only the first stage has, as numbers",
    "reformer": "runs its layers reversibly, on two streams",
    "squeezebert": "calls the forward methods of its layers instead of the layers",
}


# Note [Layer chain]
# A module list does not imply an order of execution: experts, heads and side branches are lists, too. Sources, in order
# of preference:
# - transformers' own pipeline plan;
# - an `nn.Sequential` that is the full model;
# - the traced forward (torch.fx), unless it depends on values: it shows whether all data flow passes through a module;
# - lists of layers by structure (see `find_stacks`): those of an encoder and a decoder, or the only one, or the one
#   with the most parameters. Other lists then belong to a gap; outputs of those before the layers are sent on;
# - a list, of layers of several classes, as long as transformers' configuration says;
# - an `nn.Sequential` with most of the model's parameters.

_MAIN_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChain:
    """Layer chain, with what is known of other modules.

    Attributes:
        layers: Layers, as in `StagePlan`.
        source: Description of the source, as in `StagePlan`.
        known_gaps: Known gaps, as in `find_gaps`.
        skip_outputs: Containers of layers whose output is sent to later stages, and the gap at which it is complete.
        side_branches: Layers of side branches, which run beside the chain or before it.
        overwrites_embeddings: Whether the forward changes the output of a module before the layers in place.
    """

    layers: tuple[str, ...]
    source: str
    known_gaps: Mapping[str, int | None] = field(default_factory=dict)
    skip_outputs: Mapping[str, int] = field(default_factory=dict)
    side_branches: tuple[str, ...] = ()
    overwrites_embeddings: bool = False


def find_chain(model: nn.Module) -> LayerChain:
    """Return the layer chain of a model.

    Raises:
        ConfigError: There is none, or it is ambiguous.
    """
    for name, module, config in pretrained_models(model):
        if reason := UNSPLITTABLE.get(config.model_type):
            raise ConfigError(
                f"{type(module).__name__}{f' (at {name})' if name else ''} {reason}, so its layers can't be divided"
                " over stages: use pp_size=1, or a model with layers of their own"
            )
    return _with_table_places(model, _find_chain(model))


def _find_chain(model: nn.Module) -> LayerChain:
    if (named := _named_list(model)) is not None:
        return named
    stacks = find_stacks(model)
    if (planned := _planned_chain(model, stacks)) is not None:
        return planned
    if _is_sequential(model):
        return LayerChain(
            layers=_items("", model, stacks), source="the children of the nn.Sequential that is the model"
        )
    lists = _simple_lists(model, stacks)
    if not any(True for _ in pretrained_models(model)):
        trace = trace_calls(model, (*stacks, *lists))
        if trace is not None:
            return _traced_chain(model, trace, stacks, lists)
    if stacks:
        return _chain_of_stacks(model, stacks)
    if (mixed := _list_of_all_layers(model)) is not None:
        return LayerChain(layers=mixed, source=f"{_parent(mixed)}, which has as many layers as the configuration")
    if (sequential := _main_sequential(model, lists)) is not None:
        return LayerChain(layers=sequential, source=f"the children of {_parent(sequential)}, an nn.Sequential")
    raise _no_chain_error(model)


def _named_list(model: nn.Module) -> LayerChain | None:
    """Return the chain of a list that `MODULE_PLACES` names, or None."""
    for prefix, module in _table_models(model):
        name = MODULE_PLACES[module.config.model_type].layers
        full = _named_below(model, [prefix], name) if name else None
        if full is not None:
            layers = tuple(f"{full}.{key}" for key, _ in model.get_submodule(full).named_children())
            return LayerChain(
                layers=layers, source=f"{full}, by the table for models of type {module.config.model_type}"
            )
    return None


def _table_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the models of transformers in a model, also those inside of others, that `MODULE_PLACES` has."""
    for prefix, module in model.named_modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if kind in MODULE_PLACES and hasattr(type(module), "base_model_prefix"):
            yield prefix, module


def _planned_chain(model: nn.Module, stacks: tuple[tuple[str, ...], ...]) -> LayerChain | None:
    """Return the chain of transformers' pipeline plans, or None if there is not exactly one."""
    modules = dict(model.named_modules())
    for prefix, module, config in pretrained_models(model):
        keys = [f"{prefix}.{key}" if prefix else key for key in (getattr(module, "_pp_plan", None) or {})]
        lists = [key for key in keys if isinstance(modules.get(key), nn.ModuleList)]
        # The layers of a list may be of several classes, as in hybrid models.
        planned = [tuple(f"{key}.{own}" for own, _ in modules[key].named_children()) for key in lists]
        planned = [items for items in planned if items]
        if len(planned) != 1:
            continue
        layers = planned[0]
        # Only siblings of the layers: a head, which the class adds to the plan of its base model, comes first there.
        above = _parent(layers).rpartition(".")[0]
        beside = [key for key in keys if key.rpartition(".")[0] == above]
        place = beside.index(_parent(layers))
        known: dict[str, int | None] = {key: 0 if at < place else len(layers) for at, key in enumerate(beside)}
        return LayerChain(
            layers=layers,
            source=f"the pipeline plan of {type(module).__name__} ({config.model_type})",
            known_gaps=known,
            side_branches=tuple(layer for stack in stacks if stack != layers for layer in stack),
        )
    return None


def _traced_chain(
    model: nn.Module, trace: Trace, stacks: tuple[tuple[str, ...], ...], lists: tuple[tuple[str, ...], ...]
) -> LayerChain:
    """Return the lists that are chains in the traced forward: of layers, otherwise of any modules."""
    for candidates in (stacks, lists):
        proven = [items for items in candidates if trace.is_chain(items)]
        layers = _merge_lists(model, trace, proven)
        if layers:
            source = (
                f"{', '.join(dict.fromkeys(_parent((layer,)) for layer in layers))}, as the model's forward runs them"
            )
            return LayerChain(layers=layers, source=source, known_gaps=trace.gaps(layers))
    if (pair := _encoder_and_decoder(stacks)) is not None:
        return pair
    for items in (*stacks, *lists):
        places = [trace.order(item) for item in items] if trace.runs_once(items) else []
        if len(items) > 1 and places and places == sorted(places):
            blocked = next(item for item in items[:-1] if not trace.may_split_after(item))
            raise ConfigError(
                f"the layers {items[0]!r} to {items[-1]!r} of {type(model).__name__} run one after the other, but what"
                f" {trace.bypassing(blocked)!r} returns goes around {blocked!r} to what comes behind, and only a"
                " layer's output travels from stage to stage: let the layers take it and hand it on with their output,"
                " or use pp_size=1"
            )
    raise _no_chain_error(model)


def _merge_lists(model: nn.Module, trace: Trace, lists: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the items of lists in order of execution; drops small lists until a split is possible after each item."""
    while lists:
        layers = tuple(sorted((item for items in lists for item in items), key=trace.order))
        blocked = next((layer for layer in layers[:-1] if not trace.may_split_after(layer)), None)
        if blocked is None:
            return layers
        behind = [items for items in lists if blocked in items or trace.order(items[-1]) > trace.order(blocked)]
        lists = [items for items in lists if items != min(behind, key=lambda items: _num_parameters(model, items))]
    return ()


def _chain_of_stacks(model: nn.Module, stacks: tuple[tuple[str, ...], ...]) -> LayerChain:
    if (pair := _encoder_and_decoder(stacks)) is not None:
        return pair
    sizes = [_num_parameters(model, stack) for stack in stacks]
    largest = max(sizes)
    if sizes.count(largest) > 1:
        raise ConfigError(
            f"{type(model).__name__} has several lists of layers of the same size,"
            f" {' and '.join(_parent(stack) for stack in stacks)}, and it can't be told which of them is to be divided"
            " over stages: say so with split=[names of the modules at which stages begin]"
        )
    layers = stacks[sizes.index(largest)]
    others = tuple(layer for stack in stacks if stack != layers for layer in stack)
    return LayerChain(
        layers=layers,
        source=f"the layers of {_parent(layers)}" + (", the list with the most parameters" if others else ""),
        side_branches=others,
    )


def _encoder_and_decoder(stacks: tuple[tuple[str, ...], ...]) -> LayerChain | None:
    """Return the chain of two layer lists in sibling modules named as encoder and decoder."""
    for encoder in stacks:
        for decoder in stacks:
            above, first, second = _branches(encoder[0], decoder[0])
            if encoder == decoder or not ("encoder" in first and "decoder" in second and "decoder" not in first):
                continue
            path = f"{above}.{first}" if above else first
            return LayerChain(
                layers=(*encoder, *decoder),
                source=f"the layers of {_parent(encoder)}, then those of {_parent(decoder)}",
                skip_outputs={path: len(encoder)},
                side_branches=tuple(layer for stack in stacks if stack not in (encoder, decoder) for layer in stack),
            )
    return None


def _list_of_all_layers(model: nn.Module) -> tuple[str, ...] | None:
    """Return the list with as many layers as a transformers configuration says; they may be of several classes."""
    for prefix, module, config in pretrained_models(model):
        number = getattr(config, "num_hidden_layers", None)
        for name, child in module.named_modules():
            if isinstance(child, nn.ModuleList) and len(child) == number and all(map(holds_parameters, child)):
                full = f"{prefix}.{name}" if prefix else name
                return tuple(f"{full}.{key}" for key, _ in child.named_children())
    return None


def _main_sequential(model: nn.Module, lists: tuple[tuple[str, ...], ...]) -> tuple[str, ...] | None:
    """Return the nn.Sequential with most of a model's parameters; a smaller one may be part of a residual block."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for items in lists:
        is_main = _num_parameters(model, items) >= _MAIN_SHARE * total
        if is_main and _is_sequential(model.get_submodule(_parent(items))):
            return items
    return None


def _with_table_places(model: nn.Module, chain: LayerChain) -> LayerChain:
    """Return a chain with what `MODULE_PLACES` says of the modules around its lists of layers."""
    known: dict[str, int | None] = {}
    sent_on: dict[str, int] = {}
    overwrites = False
    lists = [tuple(items) for _, items in groupby(chain.layers, lambda layer: layer.rpartition(".")[0])]
    starts = [0, *accumulate(map(len, lists))][:-1]  # the number of layers before each list
    for prefix, module in _table_models(model):
        places = MODULE_PLACES[module.config.model_type]
        overwrites = overwrites or places.overwrites_embeddings
        inside = f"{prefix}." if prefix else ""
        for layers, start in zip(lists, starts, strict=True):
            if not layers[0].startswith(inside):
                continue
            parents = [_parent(layers).rpartition(".")[0], prefix]
            for gaps, names, gap in (
                (known, places.before, start),
                (known, places.after, start + len(layers)),
                (sent_on, places.sent_on, start),
            ):
                gaps.update({full: gap for name in names if (full := _named_below(model, parents, name))})
            everywhere = (_named_below(model, parents, name) for name in places.everywhere)
            known.update({full: None for full in everywhere if full})
    return replace(
        chain,
        known_gaps={**chain.known_gaps, **known},
        skip_outputs={**sent_on, **chain.skip_outputs},
        overwrites_embeddings=overwrites,
    )


def _named_below(model: nn.Module, parents: list[str], name: str) -> str | None:
    """Return the full name of the first module that exists under that name in one of its parents."""
    candidates = [f"{parent}.{name}" if parent else name for parent in parents]
    known = dict(model.named_modules(remove_duplicate=False))
    return next((full for full in candidates if full in known), None)


def _simple_lists(model: nn.Module, stacks: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Return the items of the outermost nn.Sequential and nn.ModuleList that are not stacks and contain none."""
    found: list[tuple[str, ...]] = []
    layers = {layer for stack in stacks for layer in stack}

    def collect(module: nn.Module, name: str) -> None:
        if name in layers or isinstance(module, ParametrizationList):
            return
        is_list = isinstance(module, nn.ModuleList) or _is_sequential(module)
        if is_list and holds_parameters(module) and not any(layer.startswith(f"{name}.") for layer in layers):
            found.append(_items(name, module, stacks))
            return
        for key, child in module.named_children():
            collect(child, f"{name}.{key}" if name else key)

    collect(model, "")
    return tuple(items for items in found if items)


def _items(name: str, module: nn.Module, stacks: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Return the children of a list; an nn.Sequential of layers, or one that is the only child, is flattened.

    Modules without parameters that occur several times are left out, as every stage holds them.
    """
    children = [
        (f"{name}.{key}" if name else key, child) for key, child in module._modules.items() if child is not None
    ]
    if len({id(child) for _, child in children}) < len(children):
        children = [one for one in children if _is_once(one, children)]
    items: list[str] = []
    for full, child in children:
        if _is_sequential(child) and (len(children) == 1 or any(_parent(stack) == full for stack in stacks)):
            items.extend(_items(full, child, stacks))
        else:
            items.append(full)
    return tuple(items)


def _is_once(one: tuple[str, nn.Module], children: list[tuple[str, nn.Module]]) -> bool:
    same = [name for name, child in children if child is one[1]]
    if len(same) > 1 and holds_parameters(one[1]):
        raise ConfigError(
            f"{', '.join(same)} are the same module, which runs several times, so it can't be divided over stages: give"
            " every place a module of its own (and tie their parameters if they are to be the same), or use pp_size=1"
        )
    return len(same) == 1


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _branches(first: str, second: str) -> tuple[str, str, str]:
    """Return the name of the innermost common parent of two modules, and the names of its children towards each."""
    left, right = first.split("."), second.split(".")
    depth = 0
    while depth < min(len(left), len(right)) - 1 and left[depth] == right[depth]:
        depth += 1
    return ".".join(left[:depth]), left[depth], right[depth]


def _parent(items: tuple[str, ...]) -> str:
    return items[0].rpartition(".")[0]


def _num_parameters(model: nn.Module, items: tuple[str, ...]) -> int:
    return sum(parameter.numel() for item in items for parameter in model.get_submodule(item).parameters())


def _no_chain_error(model: nn.Module) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} has no list of layers that are known to run one after the other, so it can't be"
        " divided over stages by itself: give split=[names of the modules at which later stages begin], or"
        " execution_sequence=[names of its modules, and functions, in the order in which they run]"
    )
