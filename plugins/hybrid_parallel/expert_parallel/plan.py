"""The experts of a model: which modules hold them, and which ranks hold which. Equal on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from booster.errors import ConfigError
from booster.interface import ShardSpec
from booster.moe.discovery import ExpertsEntry, experts_entry, experts_in
from booster.plugins.hybrid_parallel.tp_plan.plan import generalize, match_names
from booster.plugins.hybrid_parallel.tp_plan.tables import pretrained_models

EXPERT_STYLE = "expert"
"""Style of users' plans for a module of experts."""

_TRANSFORMERS_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """The experts of a model and their ranks.

    Attributes:
        entries: Modules of experts, in the model's order.
        size: Number of ranks that share the experts.
        source: Where the modules were found.
    """

    entries: tuple[ExpertsEntry, ...]
    size: int
    source: str

    def bounds(self, entry: ExpertsEntry) -> list[int]:
        """Return the first expert of each rank, and the number of experts at the end; numbers differ by at most one."""
        return [-(-entry.num_experts * rank // self.size) for rank in range(self.size + 1)]

    def shard_specs(self, model: nn.Module, specs: Mapping[str, ShardSpec], rank: int) -> dict[str, ShardSpec]:
        """Return a rank's shard specs of the model's parameters.

        Args:
            model: The user's unsharded model.
            specs: Shard specs of the rank by name, without expert parallelism.
            rank: Rank among those that share the experts.

        Raises:
            ConfigError: Tensor parallelism shards the experts' dimension.
        """
        found = dict(specs)
        for entry in self.entries:
            start, stop = self.bounds(entry)[rank : rank + 2]
            module = model.get_submodule(entry.name)
            if not entry.is_stacked:
                for index, (child_name, child) in enumerate(experts_in(module)):
                    for own_name, _ in child.named_parameters():
                        name = f"{entry.name}.{child_name}.{own_name}"
                        found[name] = specs[name].held_by_expert(is_held=start <= index < stop)
                continue
            for own_name, _ in module.named_parameters(recurse=False):
                name = f"{entry.name}.{own_name}"
                try:
                    found[name] = specs[name].experts(start, stop)
                except ValueError as error:
                    raise ConfigError(
                        f"the plan shards the experts of {name!r} over the tensor-parallel ranks, but ep_size shards"
                        " them, too: give styles that shard the features of each expert, or ep_size=1"
                    ) from error
        return found

    def explain(self, rank: int) -> str:
        """Return a table of the experts by rank; equal layers share a row."""
        rows: dict[tuple[str, str], int] = {}
        for entry in self.entries:
            bounds = self.bounds(entry)
            held = [f"{start}-{stop - 1}" for start, stop in itertools.pairwise(bounds)]
            text = ", ".join(f"{'*' * (one == rank)}rank {one}: {experts}" for one, experts in enumerate(held))
            key = generalize(entry.name), f"{entry.num_experts} experts ({text})"
            rows[key] = rows.get(key, 0) + 1
        lines = [
            f"{name} ({count}): {text}" if count > 1 else f"{name}: {text}" for (name, text), count in rows.items()
        ]
        return "\n".join([*lines, f"experts: {self.source}; * this rank of the {self.size} that share them"])


def find_experts(model: nn.Module, size: int, plan: Mapping[str, object] | None) -> ExpertPlan:
    """Find a model's modules of experts.

    The first available source is used: the user's plan, that of transformers (`base_model_ep_plan` of a configuration),
    and the modules' shapes: those with stacked parameters, or equal submodules, and a forward that takes tokens, their
    experts, and weights; and plain lists or dicts of equal modules beside a router.

    Args:
        model: The user's model, possibly on the meta device. It is not changed.
        size: Number of ranks that share the experts.
        plan: Styles by pattern of module names; those of modules of experts are `EXPERT_STYLE`.

    Raises:
        ConfigError: There are no experts, fewer than ranks, or a named module holds none.

    Collective: no.
    """
    named = [pattern for pattern, style in (plan or {}).items() if style == EXPERT_STYLE]
    modules = dict(model.named_modules())
    if named:
        found, unmatched = match_names(dict.fromkeys(named, True), modules)
        if unmatched:
            raise ConfigError(
                f"the plan has {unmatched[0]!r} as {EXPERT_STYLE!r}, which matches no module of the model: write names"
                " as in model.named_modules(), with * for a layer's index"
            )
        names, source = list(found), "the plan given by the user"
    elif names := _names_of_transformers(model):
        source = "the expert-parallel plan of transformers"
    else:
        names = [name for name in modules if experts_entry(name, modules) is not None]
        source = "modules' shapes"
    entries = [_require_entry(name, modules) for name in names]
    if not entries:
        raise ConfigError(
            f"ep_size={size} shards experts, but {type(model).__name__} has none: no expert-parallel plan of"
            " transformers, no module with parameters of a leading dimension of experts and no list of equal modules"
            " whose forward takes (tokens, indices of experts, weights), and no plain list beside a gate or router with"
            " an output for each of its modules. Name them as in"
            f" plan={{'layers.*.mlp.experts': {EXPERT_STYLE!r}}}, or use ep_size=1"
        )
    for entry in entries:
        if entry.num_experts < size:
            raise ConfigError(
                f"ep_size={size} is larger than the {entry.num_experts} experts of {entry.name!r}, so some ranks would"
                f" have none: use an ep_size of at most {entry.num_experts}"
            )
    return ExpertPlan(entries=tuple(entries), size=size, source=source)


def _names_of_transformers(model: nn.Module) -> list[str]:
    """Return the modules of experts by the plans of the transformers models in a model."""
    found: dict[str, None] = {}
    for prefix, module, _ in pretrained_models(model):
        given: Mapping[str, str] = getattr(module, "_ep_plan", None) or {}
        patterns = {key: style for key, style in given.items() if style in _TRANSFORMERS_STYLES}
        names = [key for key, _ in module.named_modules()] + [key for key, _ in module.named_parameters()]
        matched, _ = match_names(patterns, names)  # patterns without a match belong to other models of the family
        for name, style in matched.items():
            owner = name.rpartition(".")[0] if style == "grouped_gemm" else name
            found.setdefault(f"{prefix}.{owner}" if prefix else owner)
    return list(found)


def _require_entry(name: str, modules: Mapping[str, nn.Module]) -> ExpertsEntry:
    entry = experts_entry(name, modules, is_named=True)
    if entry is None:
        module = modules[name]
        shapes = {own: tuple(one.shape) for own, one in module.named_parameters(recurse=False)}
        raise ConfigError(
            f"{name!r}, a {type(module).__name__}, is planned as a module of experts, but no experts are found: its"
            f" own parameters {shapes or '(none)'} have no common leading dimension, or it holds no equal modules, or"
            " its forward does not take (tokens, indices of experts, weights). Write such a module, or leave it out of"
            " the plan"
        )
    return entry
