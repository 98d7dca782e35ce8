"""Which modules hold the experts of a model, by their shapes and the arguments of their forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

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


def experts_entry(name: str, modules: Mapping[str, nn.Module], *, is_named: bool = False) -> ExpertsEntry | None:
    """Return the entry of a module of experts, or None if it is none.

    Args:
        name: Name of the module.
        modules: Modules of the model by name.
        is_named: Whether a plan names the module; otherwise names of arguments and of its neighbours have to fit, too.
    """
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
