"""Choose the source of a model's plan, and resolve everything that follows from its styles."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from booster.comm import real_tensors
from booster.core.layer_stacks import find_stacks
from booster.errors import ConfigError
from booster.placements import is_placement
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear

from .adapters import check_prefixes, shard_adapters, unwrapped_model, without_adapters
from .annotations import marked_placements, plan_of_placements
from .attention_heads import blocks_of, check_replicated_parameters, find_attentions, owner_of, role_of
from .auto_plan import derive_plan, head_attributes
from .plan import (
    COLUMN_STYLES,
    ROW_STYLES,
    SHARDED_STYLES,
    VOCABULARY_STYLES,
    PartialPlan,
    PlannedEntry,
    Style,
    TensorParallelPlan,
    UserPlan,
    feature_sizes,
    generalize,
    match_names,
    module_order,
    read_style,
    reason_of,
    split_dim,
)
from .sequence_regions import (
    all_token_blocks,
    is_cross_attention,
    is_within,
    notes_of_blocks,
    own_token_modules,
    region_starts,
)
from .tables import table_plan, transformers_plan
from .token_wise_check import check_token_wise
from .user_plan_check import modules_to_run, verify_user_plan
from .validate import check_plan, check_styles
from .weight_read_check import check_weight_reads

_BY_ROWS = VOCABULARY_STYLES | {"colwise", "colwise_gather_output"}


def _resolve_ties(model: nn.Module, styles: Mapping[str, Style]) -> tuple[dict[str, Style], dict[str, str]]:
    """Use vocabulary styles for the layers that compute logits, and for modules tied to them.

    Returns:
        The styles including those of tied modules, in the model's order; and the reasons of changed styles.
    """
    resolved = dict(styles)
    for name, style in styles.items():
        if style.name == "vocab" and not _is_parameter(model, name) and is_linear(model.get_submodule(name)):
            resolved[name] = Style("vocab_head")
    reasons: dict[str, str] = {}
    for names in _tied_modules(model):
        _resolve(model, names, resolved, reasons)
    return {name: resolved[name] for name in sorted(resolved, key=module_order(model))}, reasons


def _tied_modules(model: nn.Module) -> list[list[str]]:
    """Return the linear layers and embeddings of each tied weight, and of the output head's weight."""
    candidates = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    heads = (get_head() for get_head in candidates if callable(get_head))
    head = next((one for one in heads if one is not None), None)
    groups: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and (isinstance(module, nn.Embedding) or is_linear(module)):
            groups.setdefault(id(weight), []).append(name)
    modules = dict(model.named_modules())
    return [names for names in groups.values() if len(names) > 1 or modules[names[0]] is head]


def _resolve(model: nn.Module, names: list[str], styles: dict[str, Style], reasons: dict[str, str]) -> None:
    given = {name: styles[name] for name in names if name in styles and styles[name].name != "replicated"}
    if not given:
        return
    by_rows = all(style.name in _BY_ROWS for style in given.values())
    has_embedding = any(isinstance(model.get_submodule(name), nn.Embedding) for name in names)
    is_head = len(names) == 1
    is_vocabulary = by_rows and (has_embedding or is_head)
    first_name, first_style = next(iter(given.items()))
    if is_vocabulary:
        conflicting = [name for name in names if name in styles and styles[name].name == "replicated"]
    else:
        conflicting = [name for name in names if not _are_sharded_alike(model, first_name, name, given)]
    if conflicting:
        raise ConfigError(
            f"the plan has {first_style.name!r} for {first_name!r}, which shares its weight with {conflicting[0]!r} of"
            f" another style: give all of {', '.join(names)} the same style ('vocab' for embeddings, 'vocab_head' for"
            " heads), or untie them"
        )
    if not is_vocabulary:
        return
    for name in names:
        style_name = "vocab" if isinstance(model.get_submodule(name), nn.Embedding) else "vocab_head"
        if name not in styles:
            reasons[name] = f"shares its weight with {first_name}"
        elif styles[name].name != style_name:
            reasons[name] = "computes the logits"
        styles[name] = replace(styles.get(name, Style(style_name)), name=style_name)


def _are_sharded_alike(model: nn.Module, first: str, name: str, given: Mapping[str, Style]) -> bool:
    """Whether two modules with one weight shard it alike: by equal styles, or with inputs and outputs of all ranks."""
    if given.get(name) == given[first]:
        return True
    styles = [given[one].name for one in (first, name) if one in given]
    if len(styles) < 2 or not all(style.endswith(("_gather_output", "_split_input")) for style in styles):
        return False
    return split_dim(model.get_submodule(first), styles[0]) == split_dim(model.get_submodule(name), styles[1])


_LATENT = ("q_b_proj", "kv_b_proj")  # multi-head latent attention: each has its own input


def _find_siblings(
    model: nn.Module, styles: Mapping[str, Style], known: tuple[tuple[str, ...], ...] = ()
) -> dict[str, tuple[str, ...]]:
    """Return for each column-parallel layer the layers that read the same input, including itself."""
    found = {name: group for group in known for name in group}
    groups: dict[tuple[str, str, int], list[str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, style in styles.items():
        module = modules.get(name)
        if module is None or style.name not in COLUMN_STYLES or name in found or not is_linear(module):
            continue
        leaf = name.rpartition(".")[2]
        source = leaf if leaf in _LATENT else ""
        if is_cross_attention(name):
            source = "query" if role_of(name) == "query" else "memory"
        groups.setdefault((owner_of(name), source, feature_sizes(module)[0]), []).append(name)
    return found | {name: tuple(names) for names in groups.values() for name in names}


def _resolve_plan(model: nn.Module, partial: PartialPlan, *, shards_sequence: bool) -> TensorParallelPlan:
    """Resolve everything of a plan that follows from its styles and the model."""
    check_styles(model, partial.styles)
    styles, reasons = _resolve_ties(model, partial.styles)
    reasons = {**partial.reasons, **reasons}
    styles |= _styles_inside_embeddings(model, styles)
    stacks = find_stacks(model)
    attentions = find_attentions(model, styles)
    if not (partial.is_derived or partial.is_user_plan):
        check_replicated_parameters(model, styles, attentions)
    weights = {name: _weight(model, name, style) for name, style in styles.items()}
    blocks = {
        name: blocks_of(name, styles[name], tuple(weight.shape), dim, attentions)
        for name, (weight, dim) in weights.items()
        if weight is not None
    }
    siblings = _find_siblings(model, styles, partial.siblings)
    is_parameter = {name: _is_parameter(model, name) for name in styles}
    of_modules = {name: style for name, style in styles.items() if not is_parameter[name]}
    regions = region_starts(of_modules, stacks)
    blocks_of_all_tokens: dict[str, str] = {}
    if shards_sequence:
        blocks_of_all_tokens = all_token_blocks(model, styles, regions, stacks)
        regions = {name: region for name, region in regions.items() if not is_within(name, blocks_of_all_tokens)}
    entries = [
        PlannedEntry(
            name=name,
            style=style.name,
            blocks=blocks.get(name, ()),
            dim=weights[name][1],
            region=regions.get(name, ""),
            siblings=siblings.get(name, ()),
            is_parameter=is_parameter[name],
            reason=reasons.get(name, ""),
        )
        for name, style in styles.items()
    ]
    if shards_sequence:
        replicated = own_token_modules(model, styles, regions, stacks, blocks_of_all_tokens)
        entries.extend(
            PlannedEntry(name=name, style="sequence", reason="runs on sharded tokens") for name in replicated
        )
    order = module_order(model)
    return TensorParallelPlan(
        entries=tuple(sorted(entries, key=lambda entry: order(entry.name))),
        attributes=(*head_attributes(model, attentions, blocks), *partial.attributes),
        arguments=partial.arguments,
        stacks=stacks,
        all_token_blocks=tuple(blocks_of_all_tokens),
        source=partial.source,
        notes=(*partial.notes, *notes_of_blocks(blocks_of_all_tokens)),
    )


def _styles_inside_embeddings(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the styles of modules inside of vocabulary-parallel embeddings, such as a norm of what they look up.

    Each rank computes them for the entries that it holds.
    """
    found = {}
    for name, style in styles.items():
        if style.name == "vocab" and not _is_parameter(model, name):
            for own_name, module in model.get_submodule(name).named_modules():
                if own_name and any(True for _ in module.parameters(recurse=False)):
                    found[f"{name}.{own_name}"] = Style("replicated_with_grad_allreduce")
    return {name: style for name, style in found.items() if name not in styles}


def _weight(model: nn.Module, name: str, style: Style) -> tuple[torch.Tensor | None, int]:
    """Return the tensor that a style shards, or None, and the sharded dimension."""
    if style.name not in SHARDED_STYLES:
        return None, 0
    if _is_parameter(model, name):
        parameter = model.get_parameter(name)
        dim = parameter.ndim - 1 if style.name in ROW_STYLES else max(parameter.ndim - 2, 0)
        return parameter, dim
    module = model.get_submodule(name)
    return module.get_parameter("weight"), split_dim(module, style.name)


def _is_parameter(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(owner)._parameters


def _read_user_plan(model: nn.Module, plan: UserPlan) -> PartialPlan:
    """Parse a user's plan: styles by pattern of names of modules or bare parameters."""
    outer, inner = unwrapped_model(model)
    prefix = f"{outer}." if outer else ""
    styles = {
        pattern.removeprefix(prefix): (read_style(pattern, given), reason_of(given)) for pattern, given in plan.items()
    }
    names = [name for name, _ in inner.named_modules()] + [name for name, _ in inner.named_parameters()]
    matched, unmatched = match_names(styles, names, str(getattr(inner, "base_model_prefix", "")))
    if unmatched:
        known = sorted({generalize(name) for name in names if name})
        near = difflib.get_close_matches(unmatched[0], known, n=3, cutoff=0.4)
        hint = f": did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
        raise ConfigError(
            f"the plan has {unmatched[0]!r}, which matches no module or parameter of the model{hint or ':'} write names"
            " as in model.named_modules(), with * for a layer's index"
        )
    found = {name: style for name, (style, _) in matched.items()}
    _check_no_layer_parameters(inner, found)
    return PartialPlan(
        styles={f"{prefix}{name}": style for name, style in found.items()},
        source="the plan given by the user",
        is_user_plan=True,
        reasons={f"{prefix}{name}": reason for name, (_, reason) in matched.items() if reason},
    )


def _check_no_layer_parameters(model: nn.Module, styles: Mapping[str, Style]) -> None:
    for name in styles:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters and (is_linear(module) or isinstance(module, nn.Embedding)):
            raise ConfigError(
                f"the plan has {styles[name].name!r} for {name!r}, the {leaf} of a {type(module).__name__}, but styles"
                f" apply to layers, not their parameters: name the module, {generalize(owner)!r}"
            )


def choose_plan(
    model: nn.Module, *, tp_size: int, plan: UserPlan | None = None, shards_sequence: bool = False
) -> TensorParallelPlan:
    """Return the checked plan of a model for tensor and sequence parallelism.

    The first available source is used: the user's plan, the plan of transformers, built-in tables for models that
    transformers has no plan for, and a plan derived from the module graph.

    Args:
        model: The user's model, possibly on the meta device. It is not changed.
        tp_size: Number of tensor-parallel ranks. With 1 only stacks of layers are found and a user's plan is checked.
        plan: The user's plan, a mapping of names, optional.
        shards_sequence: Whether the sequence between regions is sharded over the tensor-parallel ranks.

    Raises:
        ConfigError: There is no plan, or it is not applicable.
    """
    if tp_size == 1:
        if plan is not None or marked_placements(model):
            _read_plan(model, plan, tp_size)  # report its mistakes already on one rank
        return TensorParallelPlan(stacks=find_stacks(model), source="no tensor parallelism")
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter and hasattr(parameter, "placements"):
            raise ConfigError(
                f"the parameter {name!r} is a DTensor, so the model is already sharded: pass the unsharded model,"
                " without a tp_plan of transformers or parallelize_module"
            )
    check_prefixes(model)
    with without_adapters(model) as wrappers:
        found = _choose_unadapted(model, tp_size, plan, shards_sequence)
    return shard_adapters(found, wrappers)


def _read_plan(model: nn.Module, plan: UserPlan | None, tp_size: int) -> PartialPlan:
    """Return the plan of the user: its styles, its placements, and those of marked parameters."""
    given = plan or {}
    placements = {name: value for name, value in given.items() if is_placement(value)}
    marked = marked_placements(model)
    if not placements and not marked:
        return _read_user_plan(model, given)
    others = {name: value for name, value in given.items() if name not in placements}
    styles = _read_user_plan(model, others) if others else None
    derived = plan_of_placements(model, placements, marked, tp_size=max(tp_size, 2))
    if styles is None:
        return derived
    both = next((name for name in derived.styles if name in styles.styles), None)
    if both is not None:
        raise ConfigError(
            f"{both!r} has a style, {styles.styles[both].name!r}, and a placement of its weight, of which"
            f" {derived.styles[both].name!r} follows: give one of them"
        )
    return replace(
        derived,
        styles={**derived.styles, **styles.styles},
        reasons={**derived.reasons, **styles.reasons},
        source="the styles and placements given",
    )


def _choose_unadapted(
    model: nn.Module, tp_size: int, plan: UserPlan | None, shards_sequence: bool
) -> TensorParallelPlan:
    if plan is not None or marked_placements(model):
        partial = _read_plan(model, plan, tp_size)
    else:
        with real_tensors():
            partial = transformers_plan(model) or table_plan(model) or derive_plan(model, tp_size)
    resolved = _resolve_plan(model, partial, shards_sequence=shards_sequence)
    if partial.is_derived and shards_sequence:
        with real_tensors():
            check_token_wise(resolved, model)
    check_plan(resolved, model, tp_size, is_user_plan=partial.is_user_plan)
    unverified: tuple[str, ...] = ()
    if partial.is_derived or partial.is_user_plan:
        with real_tensors():  # plans are tried out on values
            if partial.is_user_plan:
                unverified = verify_user_plan(resolved, model, tp_size)
            check_weight_reads(resolved, model, modules_to_run(resolved, model))
    return replace(resolved, is_derived=partial.is_derived, notes=(*resolved.notes, *unverified))
