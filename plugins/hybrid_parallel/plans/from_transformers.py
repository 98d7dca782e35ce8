"""Plans of transformers models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from booster.plugins.hybrid_parallel.plans.draft import PartialPlan, read_style
from booster.plugins.hybrid_parallel.plans.patterns import match_names
from booster.plugins.hybrid_parallel.plans.plan import Style

__all__ = ["pretrained_models", "transformers_plan"]

_EXPERT_PARALLEL = frozenset({"grouped_gemm", "ep_dispatch_experts", "ep_router"})


def pretrained_models(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the outermost transformers models in a model: name, module and configuration."""
    config = getattr(model, "config", None)
    if hasattr(model, "base_model_prefix") and hasattr(config, "model_type"):
        yield name, model, config
        return
    for key, child in model.named_children():
        yield from pretrained_models(child, f"{name}.{key}" if name else key)


def transformers_plan(model: nn.Module) -> PartialPlan | None:
    """Return the plan of the transformers models in a model, or None if they have none."""
    found: dict[str, Style] = {}
    sources = []
    for name, module, config in pretrained_models(model):
        styles = _transformers_styles(module)
        if not any(style.name.startswith(("colwise", "packed_colwise", "moe_")) for style in styles.values()):
            continue
        found.update({f"{name}.{key}" if name else key: style for key, style in styles.items()})
        sources.append(f"{type(module).__name__} ({config.model_type})")
    if not found:
        return None
    return PartialPlan(styles=found, source=f"transformers' own plan of {', '.join(sources)}")


def _transformers_styles(module: nn.Module) -> dict[str, Style]:
    """Return a model's styles. Patterns without a match belong to other models of the family."""
    given: dict[str, str] = getattr(module, "_tp_plan", None) or {}
    plan = {name: read_style(name, style) for name, style in given.items() if style not in _EXPERT_PARALLEL}
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    return match_names(plan, names)[0]
