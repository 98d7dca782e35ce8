"""The experts of a model: which modules hold them, and which ranks hold which. Equal on all ranks."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from booster.errors import ConfigError
from booster.interface import ShardSpec
from booster.plugins.hybrid_parallel.tp_plan.plan import generalize, match_names
from booster.plugins.hybrid_parallel.tp_plan.tables import pretrained_models

EXPERT_STYLE = "expert"
"""Style of users' plans for a module of experts."""

_TRANSFORMERS_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts"})
_SCALED_INPUTS = frozenset({"Llama4TextExperts"})  # whose forward takes tokens only: sorted by expert and scaled
_FEWEST_EXPERTS = 2
# Words in the names of a forward's second and third argument, where only the shapes say that a module holds experts.
_ROUTERS = ("gate", "router")  # in the names of routers
_INDICES, _WEIGHTS = ("expert", "index", "indices", "rout"), ("weight", "prob", "score", "gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsEntry:
    """A module of experts.

    Attributes:
        name: Name of the module.
        num_experts: Number of experts.
        is_stacked: Whether the experts are rows of the module's parameters, otherwise submodules.
        is_looped: Whether it is a plain list or dict, whose experts the block around it calls.
    """

    name: str
    num_experts: int
    is_stacked: bool
    is_looped: bool = False


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
        """Return the first expert of each rank, and the number of experts at the end; the first ranks hold one more."""
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
            bounds = self.bounds(entry)
            start, stop = bounds[rank], bounds[rank + 1]
            module = model.get_submodule(entry.name)
            for name, spec in _specs_of(entry, module, specs, start, stop):
                found[name] = spec
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


def _specs_of(
    entry: ExpertsEntry, module: nn.Module, specs: Mapping[str, ShardSpec], start: int, stop: int
) -> Iterator[tuple[str, ShardSpec]]:
    if entry.is_stacked:
        for own_name, _ in module.named_parameters(recurse=False):
            name = f"{entry.name}.{own_name}"
            try:
                yield name, specs[name].experts(start, stop)
            except ValueError as error:
                raise ConfigError(
                    f"the plan shards the experts of {name!r} over the tensor-parallel ranks, but ep_size shards them,"
                    " too: give styles that shard the features of each expert, or ep_size=1"
                ) from error
        return
    for index, (child_name, child) in enumerate(experts_in(module)):
        for own_name, _ in child.named_parameters():
            name = f"{entry.name}.{child_name}.{own_name}"
            yield name, specs[name].held_by_expert(is_held=start <= index < stop)


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
        names = [name for name in modules if _entry_of(name, modules) is not None]
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
    entry = _entry_of(name, modules, is_named=True)
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


def _entry_of(name: str, modules: Mapping[str, nn.Module], *, is_named: bool = False) -> ExpertsEntry | None:
    module = modules[name]
    if type(module) in (nn.ModuleList, nn.ModuleDict):
        return _looped_entry(name, modules, is_named=is_named)
    if not _takes_routing(module, is_named=is_named):
        return None
    own = list(module.parameters(recurse=False))
    if own:
        sizes = {one.shape[0] if one.ndim > 1 else 0 for one in own}
        is_stacked = len(sizes) == 1 and min(sizes) >= _FEWEST_EXPERTS and not any(True for _ in experts_in(module))
        return ExpertsEntry(name=name, num_experts=sizes.pop(), is_stacked=True) if is_stacked else None
    experts = _equal_experts(module)
    return ExpertsEntry(name=name, num_experts=len(experts), is_stacked=False) if experts else None


def _looped_entry(name: str, modules: Mapping[str, nn.Module], *, is_named: bool) -> ExpertsEntry | None:
    """Return the entry of a plain list or dict of experts, which take tokens only, in a block with a router."""
    experts = _equal_experts(modules[name])
    if not experts or not name or len(_required_arguments(experts[0])) != 1:
        return None
    block = modules[name.rpartition(".")[0]]
    has_router = any(
        any(word in key for word in _ROUTERS) and any(p.shape[:1] == (len(experts),) for p in one.parameters())
        for key, one in block.named_children()
    )
    if not has_router and not is_named:
        return None
    return ExpertsEntry(name=name, num_experts=len(experts), is_stacked=False, is_looped=True)


def _equal_experts(module: nn.Module) -> list[nn.Module]:
    """Return the submodules of a list of experts, or nothing if there are none or they differ."""
    experts = [one for _, one in experts_in(module)]
    kinds = {(type(one), tuple((key, p.shape) for key, p in one.named_parameters())) for one in experts}
    return experts if len(experts) >= _FEWEST_EXPERTS and len(kinds) == 1 else []


def _required_arguments(module: nn.Module) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]


def experts_in(module: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    """Return the submodules of a list or dict of experts; of a module that holds one, the list's."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [(name, one) for name, one in module.named_children() if any(True for _ in one.parameters())]
    lists = [(name, one) for name, one in module.named_children() if isinstance(one, nn.ModuleList | nn.ModuleDict)]
    if len(lists) != 1:
        return []
    return [(f"{lists[0][0]}.{name}", one) for name, one in experts_in(lists[0][1])]


def _takes_routing(module: nn.Module, *, is_named: bool) -> bool:
    """Return whether a module's forward takes tokens, their experts and weights, or is known to take scaled tokens."""
    if type(module).__name__ in _SCALED_INPUTS:
        return True
    names = list(inspect.signature(module.forward).parameters)
    if len(names) != 3:
        return False
    return is_named or (any(word in names[1] for word in _INDICES) and any(word in names[2] for word in _WEIGHTS))
