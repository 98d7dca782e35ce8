"""Selection of a model's stage plan: its layers, the modules around them, and the user's split."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from booster.errors import ConfigError, format_list
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import simulate
from booster.plugins.hybrid_parallel.tp_plan.plan import aligned
from booster.plugins.hybrid_parallel.tp_plan.tables import pretrained_models

from .balance import chunk_costs
from .layer_chain import LayerChain, find_chain
from .stage_plan import StagePartition, StagePlan, listed, parameters_below, shared_parameter_names
from .tracing import Trace, containers_of, find_gaps, holds_parameters, outside_of, trace_calls


def _check_steps(model: nn.Module, sequence: Sequence[str | Callable[..., Any]]) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    for step in sequence:
        if isinstance(step, nn.Module):
            name = names.get(id(step))
            what = f"of the model: write its name, {name!r}" if name else "that is not in the model: put it in there"
            raise ConfigError(
                f"execution_sequence has a module itself ({type(step).__name__}) {what}, since each stage keeps only"
                " modules that are named"
            )


def _check_names(model: nn.Module, layers: tuple[str, ...]) -> None:
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if not layers:
        raise ConfigError(
            "execution_sequence has no names of modules, so there is nothing to divide over stages: name the model's"
            f" modules in the order in which they run, such as {known[:3]!r}"
        )
    _check_known("execution_sequence", layers, known)
    if repeated := [name for name in dict.fromkeys(layers) if layers.count(name) > 1]:
        raise ConfigError(
            f"execution_sequence names {', '.join(map(repr, repeated))} more than once, but a module runs on one stage"
            " only: name each once (and give a second place a module of its own)"
        )
    for name in layers:
        if around := next((other for other in layers if name.startswith(f"{other}.")), None):
            raise ConfigError(
                f"execution_sequence names {name!r} and {around!r}, which holds it: name the one or the other"
            )


def _check_known(argument: str, names: Iterable[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "take a name of model.named_modules()"
            raise ConfigError(f"{argument} names {name!r}, but the model has no such module: {hint}")


def _check_complete(model: nn.Module, layers: tuple[str, ...]) -> None:
    held = {id(parameter) for name in layers for _, parameter in parameters_below(model, name)}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if missing:
        owners = list(dict.fromkeys(name.rpartition(".")[0] or f"the model's own {name}" for name in missing))
        raise ConfigError(
            f"execution_sequence leaves out modules with parameters ({format_list(owners, 5)}), which no stage would"
            " hold: add their names where they run, or remove them from the model"
        )


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
        _check_steps(model, execution_sequence)
        # Functions run on the stage of the module before them, leading ones on that of the first module.
        layers = tuple(step for step in execution_sequence if isinstance(step, str))
        _check_names(model, layers)
        _check_complete(model, layers)
        source = "the execution sequence that was given"
        plan = StagePlan(layers=layers, source=source, sequence=tuple(execution_sequence))
    elif split is not None:
        plan = _plan_around(model, _checked_names(model, split))
    else:
        plan = _plan_of(model, find_chain(model))
    return plan if split is None else replace(plan, bounds=_bounds(plan.layers, _checked_names(model, split)))


def _plan_of(model: nn.Module, chain: LayerChain) -> StagePlan:
    gaps = find_gaps(model, chain.layers, {**_output_heads(model, chain.layers), **chain.known_gaps})
    # Side branches may run beside the chain instead of before it, so later stages may need their outputs.
    side_outputs = {
        name: gap
        for name, gap in gaps.items()
        if gap < len(chain.layers) and any(layer.startswith(f"{name}.") for layer in chain.side_branches)
    }
    return StagePlan(
        layers=chain.layers,
        gaps=gaps,
        skip_outputs={**side_outputs, **chain.skip_outputs},
        source=chain.source,
        overwrites_embeddings=chain.overwrites_embeddings,
    )


def _output_heads(model: nn.Module, layers: tuple[str, ...]) -> dict[str, int | None]:
    """Return the gap of the heads of transformers models: after the last layer, wherever they are registered."""
    containers = containers_of(layers)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, int | None] = {}
    pretrained: Any
    for _, pretrained, _ in pretrained_models(model):
        head = pretrained.get_output_embeddings() if hasattr(pretrained, "get_output_embeddings") else None
        # FSMT returns the embeddings of its decoder, whose weight is that of the head.
        if id(head) in names and not isinstance(head, nn.Embedding) and head is not pretrained.get_input_embeddings():
            found[outside_of(names[id(head)], containers)] = len(layers)
    return found


def _plan_around(model: nn.Module, names: tuple[str, ...]) -> StagePlan:
    """Return a plan whose layers contain the modules of a split."""
    try:
        chain = find_chain(model)
    except ConfigError:  # no chain, or an ambiguous one, which the split resolves
        chain = None
    if chain is not None and set(names) <= set(chain.layers):
        return _plan_of(model, chain)
    layers = _siblings(model, names)
    missing = [name for name in names if name not in layers]
    if missing:
        known = layers if chain is None else chain.layers
        raise ConfigError(
            f"split names {', '.join(map(repr, missing))}, where the model can't be cut: stages can begin at"
            f" {listed(known)}, or at modules that all have the same parent"
        )
    source = f"the children of {_common_parent(names) or 'the model'} that have parameters"
    trace = trace_calls(model, (layers,))
    if trace is None or not trace.runs_once(layers):
        _check_outside_of_layers(names, () if chain is None else chain.layers)
        gaps = find_gaps(model, layers, {})
        return StagePlan(layers=layers, gaps=gaps, source=f"{source}, in the order in which they are registered")
    layers = tuple(sorted(layers, key=trace.order))
    _check_cuts(layers, names, trace)
    gaps = find_gaps(model, layers, trace.gaps(layers))
    return StagePlan(layers=layers, gaps=gaps, source=f"{source}, as the model's forward runs them")


def _check_outside_of_layers(names: tuple[str, ...], layers: tuple[str, ...]) -> None:
    for name in names:
        if layer := next((one for one in layers if name.startswith(f"{one}.")), None):
            raise ConfigError(
                f"split names {name!r}, which is inside of {layer!r}, one layer of many that run one after the other:"
                f" stages can begin at {listed(layers[1:])}"
            )


def _check_cuts(layers: tuple[str, ...], names: tuple[str, ...], trace: Trace) -> None:
    for name in names:
        before = layers[max(layers.index(name) - 1, 0)]
        if name != layers[0] and not trace.may_split_after(before):
            possible = [after for layer, after in pairwise(layers) if trace.may_split_after(layer)]
            raise ConfigError(
                f"split names {name!r}, but what {trace.bypassing(before)!r} returns goes around {before!r} to what"
                " comes behind, and only the output of the module before travels from stage to stage: "
                + (f"of these modules stages can begin at {listed(possible)}, or " if possible else "")
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
    common = frozenset.intersection(*(containers_of((name,)) for name in names))
    return max(common, key=len)


def _checked_names(model: nn.Module, split: Sequence[str]) -> tuple[str, ...]:
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    _check_known("split", split, known)
    if repeated := [name for name in dict.fromkeys(split) if split.count(name) > 1]:
        raise ConfigError(
            f"split names {', '.join(map(repr, repeated))} more than once, which would make a stage without modules:"
            " name every module at which a stage begins once"
        )
    return tuple(split)


def _bounds(layers: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    if unknown := next((name for name in names if name not in layers), None):
        raise ConfigError(
            f"split names {unknown!r}, which is not in the execution sequence: stages can begin at {listed(layers)}"
        )
    starts = [layers.index(name) for name in names]
    if 0 in starts:
        raise ConfigError(
            f"split names {layers[0]!r}, the first module that can be divided: the first stage begins there anyway, so"
            " leave it out, and name where the second and later stages begin"
        )
    if starts != sorted(starts):
        in_order = sorted(names, key=layers.index)
        raise ConfigError(f"split={list(names)!r} is not in the order in which the modules run: write {in_order!r}")
    return (0, *starts, len(layers))


_HEADER = ("stage", "chunk", "layers", "modules outside of them", "parameters", "MiB", "cost")


def explain_stages(model: nn.Module, partition: StagePartition, num_microbatches: int | None = None) -> str:
    """Return a partition as a table with a line per chunk, in model order.

    Args:
        model: The full model, before it is partitioned.
        partition: Its partition.
        num_microbatches: Microbatches per step, from which the bubble is computed; optional.
    """
    plan, bounds = partition.plan, partition.bounds
    costs = chunk_costs(model, plan, bounds)
    total = sum(costs) or 1.0
    rows: list[tuple[str, ...]] = []
    for position, cost in enumerate(costs):
        stage, chunk = partition.schedule.place(position, partition.num_stages)
        layers = plan.layers[bounds[position] : bounds[position + 1]]
        outside = [name for name, gap in plan.gaps.items() if partition.position_of_gap(gap) == position]
        below = (parameters_below(model, name) for name in (*layers, *outside))
        held = {id(parameter): parameter for found in below for _, parameter in found}.values()  # tied ones once
        number, size = sum(one.numel() for one in held), sum(one.numel() * one.element_size() for one in held)
        span = layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]} ({len(layers)})"
        rows.append(
            (
                *(str(stage), str(chunk), span, ", ".join(outside) or "-"),
                *(f"{number:,}", f"{size / 2**20:,.2f}", f"{cost / total:.1%}"),
            )
        )
    lines = aligned([_HEADER, *rows], num_texts=4)
    lines.append(f"plan: {plan.source}")
    lines.append(_schedule_line(partition, num_microbatches))
    lines.extend(_shared_lines(model, partition))
    if plan.skip_outputs:
        lines.append(f"sent on to all later stages: the output of {', '.join(plan.skip_outputs)}")
    return "\n".join(lines)


def _schedule_line(partition: StagePartition, num_microbatches: int | None) -> str:
    schedule, num_stages, num_chunks = partition.schedule, partition.num_stages, partition.num_chunks
    line = f"schedule: {schedule.name}, {num_stages} stages"
    if num_chunks > 1:
        line += f" of {num_chunks} chunks"
    if num_microbatches is None:
        return line
    waiting = simulate(schedule, num_stages, num_microbatches, num_chunks).bubble_fraction
    return f"{line}, {num_microbatches} microbatches: stages wait {waiting:.1%} of the time if all chunks cost the same"


def _shared_lines(model: nn.Module, partition: StagePartition) -> list[str]:
    stages: dict[int, set[int]] = {}
    names: dict[int, dict[str, None]] = {}
    for name in partition.plan.places:
        for full, parameter in parameters_below(model, name):
            stages.setdefault(id(parameter), set()).update(partition.stages_of(name))
            names.setdefault(id(parameter), {})[full] = None
    lines = [f"held by all stages: {name}" for name in shared_parameter_names(model, partition.plan)]
    for key, holders in stages.items():
        if len(holders) > 1:
            lines.append(f"held by stages {', '.join(map(str, sorted(holders)))}: {' = '.join(names[key])}")
    return lines
