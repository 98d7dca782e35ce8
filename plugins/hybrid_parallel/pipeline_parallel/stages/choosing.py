"""Selection of a model's stage plan: its layers, the modules around them, and the user's split."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.chains import LayerChain, find_chain
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.gaps import (
    containers_of,
    find_gaps,
    holds_parameters,
    outside_of,
)
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.sequences import plan_of_sequence
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stage_plan import StagePlan
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.tracing import Trace, trace_calls
from booster.plugins.hybrid_parallel.plans.from_transformers import pretrained_models

__all__ = ["choose_stage_plan"]


def choose_stage_plan(
    model: nn.Module,
    *,
    split: Sequence[str] | None = None,
    execution_sequence: Sequence[str | Callable[..., Any]] | None = None,
) -> StagePlan:
    """Return the stage plan of a model; see Note [Layers and gaps] and Note [Layer chain].

    Args:
        model: The user's full model; it may be on the meta device.
        split: Names of the first modules of the second and later chunks, in order. They are layers of the model's
            chain, or siblings whose parent runs its children in order of registration.
        execution_sequence: Names of modules, and functions, that replace the model's forward and are applied in order.

    Raises:
        ConfigError: The model has no known layer chain, or the arguments do not match it.
    """
    if execution_sequence is not None:
        plan = plan_of_sequence(model, execution_sequence)
    elif split is not None:
        plan = _plan_around(model, _checked_names(model, split))
    else:
        plan = _plan_of(model, find_chain(model))
    return plan if split is None else replace(plan, bounds=_bounds(plan.layers, _checked_names(model, split)))


def _plan_of(model: nn.Module, chain: LayerChain) -> StagePlan:
    gaps = find_gaps(model, chain.layers, {**_output_heads(model, chain.layers), **chain.known_gaps})
    return StagePlan(
        layers=chain.layers,
        gaps=gaps,
        skip_outputs={**_side_branch_outputs(chain.side_branches, gaps, len(chain.layers)), **chain.skip_outputs},
        source=chain.source,
    )


def _output_heads(model: nn.Module, units: tuple[str, ...]) -> dict[str, int | None]:
    """Return the gap of the heads of transformers models: after the last layer, wherever they are registered."""
    containers = containers_of(units)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, int | None] = {}
    pretrained: Any
    for _, pretrained, _ in pretrained_models(model):
        head = pretrained.get_output_embeddings() if hasattr(pretrained, "get_output_embeddings") else None
        if id(head) in names and head is not pretrained.get_input_embeddings():
            found[outside_of(names[id(head)], containers)] = len(units)
    return found


def _side_branch_outputs(side_branches: tuple[str, ...], gaps: Mapping[str, int], end: int) -> dict[str, int]:
    """Return the gap modules with layers of side branches, except those after the last layer of the chain.

    They may run beside the chain instead of before it, so later stages may need their outputs.
    """
    return {
        name: gap
        for name, gap in gaps.items()
        if gap < end and any(tower.startswith(f"{name}.") for tower in side_branches)
    }


def _plan_around(model: nn.Module, names: tuple[str, ...]) -> StagePlan:
    """Return a plan whose units contain the modules of a split."""
    try:
        chain = find_chain(model)
    except ConfigError:  # no chain, or an ambiguous one, which the split resolves
        chain = None
    if chain is not None and set(names) <= set(chain.layers):
        return _plan_of(model, chain)
    units = _siblings(model, names)
    missing = [name for name in names if name not in units]
    if missing:
        known = units if chain is None else chain.layers
        raise ConfigError(
            f"split names {', '.join(map(repr, missing))}, where the model can't be cut: stages can begin at"
            f" {_listed(known)}, or at modules that all have the same parent"
        )
    source = f"the children of {_common_parent(names) or 'the model'} that have parameters"
    trace = trace_calls(model, (units,))
    if trace is None or not trace.runs_once(units):
        _check_outside_of_layers(names, () if chain is None else chain.layers)
        gaps = find_gaps(model, units, {})
        return StagePlan(layers=units, gaps=gaps, source=f"{source}, in the order in which they are registered")
    units = tuple(sorted(units, key=trace.order))
    _check_cuts(units, names, trace)
    gaps = find_gaps(model, units, trace.gaps(units))
    return StagePlan(layers=units, gaps=gaps, source=f"{source}, as the model's forward runs them")


def _check_outside_of_layers(names: tuple[str, ...], layers: tuple[str, ...]) -> None:
    for name in names:
        if layer := next((one for one in layers if name.startswith(f"{one}.")), None):
            raise ConfigError(
                f"split names {name!r}, which is inside of {layer!r}, one layer of many that run one after the other:"
                f" stages can begin at {_listed(layers[1:])}"
            )


def _check_cuts(units: tuple[str, ...], names: tuple[str, ...], trace: Trace) -> None:
    for name in names:
        before = units[max(units.index(name) - 1, 0)]
        if name != units[0] and not trace.may_split_after(before):
            possible = [after for unit, after in pairwise(units) if trace.may_split_after(unit)]
            raise ConfigError(
                f"split names {name!r}, but what {trace.bypassing(before)!r} returns goes around {before!r} to what"
                " comes behind, and only the output of the module before travels from stage to stage: "
                + (f"of these modules stages can begin at {_listed(possible)}, or " if possible else "")
                + "let the modules between take it and hand it on with their output"
            )


def _siblings(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the named modules and their siblings with parameters; lists are flattened."""
    above = _common_parent(names)
    found: list[str] = []

    def collect(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            full = f"{name}.{key}" if name else key
            is_around = any(one.startswith(f"{full}.") for one in names)
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or (isinstance(child, nn.Sequential) and is_around):
                collect(child, full)
            elif full in names or holds_parameters(child):
                found.append(full)

    collect(model.get_submodule(above), above)
    return tuple(found)


def _common_parent(names: tuple[str, ...]) -> str:
    """Return the name of the innermost common parent of modules."""
    common = frozenset.intersection(*(containers_of((name,)) for name in names))
    return max(common, key=len)


def _checked_names(model: nn.Module, split: Sequence[str]) -> tuple[str, ...]:
    if isinstance(split, str) or not split or not all(isinstance(name, str) for name in split):
        raise ConfigError(
            f"split={split!r} is no list of names: give the names of the modules at which the second and later stages"
            " begin, such as split=['model.layers.4']"
        )
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in split:
        if name not in known:
            raise ConfigError(f"split names {name!r}, but the model has no such module{_nearest(name, known)}")
    if repeated := [name for name in dict.fromkeys(split) if split.count(name) > 1]:
        raise ConfigError(
            f"split names {', '.join(map(repr, repeated))} more than once, which would make a stage without modules:"
            " name every module at which a stage begins once"
        )
    return tuple(split)


def _bounds(units: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    if unknown := next((name for name in names if name not in units), None):
        raise ConfigError(
            f"split names {unknown!r}, which is not in the execution sequence: stages can begin at {_listed(units)}"
        )
    starts = [units.index(name) for name in names]
    if 0 in starts:
        raise ConfigError(
            f"split names {units[0]!r}, the first module that can be divided: the first stage begins there anyway, so"
            " leave it out, and name where the second and later stages begin"
        )
    if starts != sorted(starts):
        in_order = sorted(names, key=units.index)
        raise ConfigError(f"split={list(names)!r} is not in the order in which the modules run: write {in_order!r}")
    return (0, *starts, len(units))


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f": did you mean {' or '.join(map(repr, near))}?"
    return ": take a name of model.named_modules()"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = names if len(names) <= 6 else [*names[:3], "...", *names[-2:]]
    return ", ".join(shown)
