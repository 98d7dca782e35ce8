"""Which modules hold the experts of a model, by shapes and the arguments of their forward, and their routers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from booster.core.shard_spec import shard_spec_of

_SCALED_INPUTS = frozenset({"Llama4TextExperts"})  # whose forward takes tokens only: sorted by expert and scaled
_FEWEST_EXPERTS = 2
# Words in the names of a forward's second and third argument, where only the shapes say that a module holds experts.
_ROUTERS = ("gate", "router")  # in the names of routers
_INDICES, _WEIGHTS = ("expert", "index", "indices", "rout"), ("weight", "prob", "score", "gate")
_ROUTER_LOGITS = "router_logits"  # of what transformers' models can record

DISPATCH_OBSERVERS = "_dispatch_observers"
"""Attribute with the `DispatchObservers` of a module whose forward sends tokens to the ranks of their experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsEntry:
    """A module of experts: rows of its parameters if it is stacked, otherwise submodules.

    A looped one is a plain list or dict, whose experts the block around it calls.
    """

    name: str
    num_experts: int
    is_stacked: bool
    is_looped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEntry:
    """A router that returns logits, at a position of its output if this is a tuple.

    The scores of experts are sigmoids of the logits if it uses them, otherwise their softmax.
    """

    name: str
    index: int
    uses_sigmoid: bool


@dataclass(frozen=True, slots=True, eq=False)
class DispatchObservers:
    """Observers of a module of experts that several ranks share, whose tokens travel to the ranks of their experts.

    Attributes:
        name: Name of the module of experts.
        num_experts: Number of experts.
        observers: Functions of the number of tokens of each expert, of shape (experts,), and the number of dropped
            ones, a 0-dim tensor; both are of this rank's tokens. Called in every forward.
    """

    name: str
    num_experts: int
    observers: list[Callable[[Tensor, Tensor], None]] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchObservers:
        return DispatchObservers(self.name, self.num_experts)


def experts_entry(name: str, modules: Mapping[str, nn.Module], *, is_named: bool = False) -> ExpertsEntry | None:
    """Return the entry of a module of a model, or None if it holds no experts.

    Where no plan names it, names of arguments and of its neighbours have to fit, too.
    """
    module = modules[name]
    if type(module) in (nn.ModuleList, nn.ModuleDict):
        return _looped_entry(name, modules, is_named=is_named)
    if not _takes_routing(module, is_named=is_named):
        return None
    own = [_shape(one) for one in module.parameters(recurse=False)]
    if own:
        sizes = {one[0] if len(one) > 1 else 0 for one in own}
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
        any(word in key for word in _ROUTERS) and any(_shape(p)[:1] == (len(experts),) for p in one.parameters())
        for key, one in block.named_children()
    )
    if not has_router and not is_named:
        return None
    return ExpertsEntry(name=name, num_experts=len(experts), is_stacked=False, is_looped=True)


def _equal_experts(module: nn.Module) -> list[nn.Module]:
    """Return the submodules of a list of experts, or nothing if there are none or they differ."""
    experts = [one for _, one in experts_in(module)]
    kinds = {(type(one), tuple((key, _shape(p)) for key, p in one.named_parameters())) for one in experts}
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
    if takes_scaled_tokens(module):
        return True
    names = list(inspect.signature(module.forward).parameters)
    if len(names) != 3:
        return False
    return is_named or (any(word in names[1] for word in _INDICES) and any(word in names[2] for word in _WEIGHTS))


def takes_scaled_tokens(module: nn.Module) -> bool:
    """Return whether a module of experts takes a block of all tokens for each expert, scaled by its score."""
    return any(one.__name__ in _SCALED_INPUTS for one in type(module).__mro__)


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, of which a plugin may hold a shard."""
    return tuple(shard_spec_of(parameter).logical_shape)


# Routers.


def find_routers(model: nn.Module, experts: Mapping[str, int]) -> dict[str, list[RouterEntry]]:
    """Return the routers with logits of modules of experts, by the names of these; several if blocks share experts.

    A router is one that transformers records the logits of (`_can_record_outputs`), or an `nn.Linear` named gate or
    router with an output for each expert. It is in the innermost block around the experts that has any, if that has one
    only, and no other experts.

    Args:
        model: The user's model, boosted or not.
        experts: Number of experts by name of the module.

    Collective: no.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    recorded = dict(_recorded_routers(model))
    known = {modules[name]: name for name in experts}
    places = {place: known[module] for place, module in modules.items() if module in known}
    found: dict[str, list[RouterEntry]] = {name: [] for name in experts}
    for place, name in places.items():
        routers = _routers_around(place, experts[name], places, recorded, modules)
        if len(routers) == 1:
            found[name].append(_router_entry(routers[0], recorded.get(routers[0], 0), modules))
    return found


def _routers_around(
    place: str,
    num_experts: int,
    places: Collection[str],
    recorded: Collection[str],
    modules: Mapping[str, nn.Module],
) -> list[str]:
    """Return the routers of the innermost block around experts that has any, or nothing if it has other experts."""
    block = place
    while block:
        block = block.rpartition(".")[0]
        inside = f"{block}." if block else ""
        if sum(other.startswith(inside) for other in places) > 1:
            break
        routers = [one for one in recorded if one.startswith(inside) and not f"{place}.".startswith(f"{one}.")]
        routers = routers or list(_linear_routers(modules[block], inside, num_experts))
        if routers:
            return routers
    return []


def _recorded_routers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the modules whose logits transformers records, and the logits' position in their output."""
    for prefix, owner in model.named_modules():
        recorders = (getattr(owner, "_can_record_outputs", None) or {}).get(_ROUTER_LOGITS, ())
        for recorder in recorders if isinstance(recorders, (list, tuple)) else [recorders]:
            target: Any = getattr(recorder, "target_class", None)
            part = getattr(recorder, "layer_name", None)
            for own_name, module in owner.named_modules() if isinstance(target, type) else ():
                name = f"{prefix}.{own_name}" if prefix else own_name
                if isinstance(module, target) and (part is None or f".{part}." in f".{name}."):
                    yield name, recorder.index


def _linear_routers(block: nn.Module, inside: str, num_experts: int) -> Iterator[str]:
    for key, one in block.named_children():
        if any(word in key for word in _ROUTERS) and isinstance(one, nn.Linear) and one.out_features == num_experts:
            yield f"{inside}{key}"


def _router_entry(name: str, index: int, modules: Mapping[str, nn.Module]) -> RouterEntry:
    router = modules[name]
    if type(router).forward is nn.Linear.forward:  # its block computes the scores
        router = modules[name.rpartition(".")[0]]
    return RouterEntry(name=name, index=index, uses_sigmoid=_uses_sigmoid(router))


def _uses_sigmoid(module: nn.Module) -> bool:
    """Return whether a module's forward calls a sigmoid; one that calls both functions has the name as an attribute.

    No data of a model says how it scores experts, but the names that its forward uses do.
    """
    called: set[str] = set()
    for one in type(module).__mro__:
        if one is nn.Module:
            break
        code = getattr(inspect.unwrap(vars(one).get("forward", one)), "__code__", None)
        called.update(() if code is None else code.co_names)
    if any(isinstance(child, nn.Sigmoid) for child in module.children()):
        return True
    texts = [value for value in vars(module).values() if isinstance(value, str)]
    return "sigmoid" in called and ("softmax" not in called or "sigmoid" in texts)
