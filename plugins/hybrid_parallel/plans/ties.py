"""Styles of tied weights: heads and embeddings are sharded over the rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.plan import Style
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear

__all__ = ["resolve_ties"]

_BY_ROWS = frozenset({"colwise", "colwise_gather_output", "vocab", "vocab_head"})


def resolve_ties(model: nn.Module, styles: Mapping[str, Style]) -> tuple[dict[str, Style], dict[str, str]]:
    """Use vocabulary styles for the layers that compute logits, and for modules tied to them.

    Args:
        model: The user's model.
        styles: Styles of modules and bare parameters, by name.

    Returns:
        The styles including those of tied modules, in the model's order; and the reasons of changed styles.

    Raises:
        ConfigError: Modules that share a weight would be sharded differently.
    """
    resolved = dict(styles)
    reasons: dict[str, str] = {}
    for names in _tied_modules(model):
        _resolve(model, names, resolved, reasons)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    parameters = [name for name in resolved if name not in order]
    first = {name: order.get(name.rpartition(".")[0], 0) + 0.5 for name in parameters}
    return dict(sorted(resolved.items(), key=lambda item: order.get(item[0], first.get(item[0], 0)))), reasons


def _tied_modules(model: nn.Module) -> list[list[str]]:
    """Return the linear layers and embeddings of each tied weight, and of the output head's weight."""
    head = _output_head(model)
    groups: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and (isinstance(module, nn.Embedding) or is_linear(module)):
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
    if not by_rows or not (has_embedding or is_head):
        _check_same_style(names, given, styles)
        return
    for name in names:
        style_name = "vocab" if isinstance(model.get_submodule(name), nn.Embedding) else "vocab_head"
        if name in styles and styles[name].name == "replicated":
            _raise_conflict(names, given, name)
        if name not in styles:
            reasons[name] = f"shares its weight with {next(iter(given))}"
        elif styles[name].name != style_name:
            reasons[name] = "computes the logits"
        styles[name] = replace(styles.get(name, Style(style_name)), name=style_name)


def _check_same_style(names: list[str], given: Mapping[str, Style], styles: dict[str, Style]) -> None:
    first = next(iter(given.values()))
    if any(name not in given or given[name] != first for name in names):
        other = next(name for name in names if name not in given or given[name] != first)
        _raise_conflict(names, given, other)


def _raise_conflict(names: list[str], given: Mapping[str, Style], other: str) -> None:
    name, style = next(iter(given.items()))
    raise ConfigError(
        f"the plan has {style.name!r} for {name!r}, which shares its weight with {other!r} of another style: give all"
        f" of {', '.join(names)} the same style ('vocab' for embeddings, 'vocab_head' for heads), or untie them"
    )


def _output_head(model: nn.Module) -> nn.Module | None:
    for module in model.modules():
        get_head: Callable[[], nn.Module | None] | None = getattr(module, "get_output_embeddings", None)
        if callable(get_head) and (head := get_head()) is not None:
            return head if isinstance(head, nn.Module) else None
    return None
