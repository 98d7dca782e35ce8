"""Stage plans as a table: modules, sizes and compute share of each stage."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import PipelineSchedule
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.simulation import simulate
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.balance import chunk_costs, position_of_gap
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stage_plan import (
    StagePlan,
    parameters_below,
    shared_parameter_names,
)

__all__ = ["explain_stages"]

_HEADER = ("stage", "chunk", "layers", "modules outside of them", "parameters", "MiB", "cost")
_NUM_TEXTS = 4


def explain_stages(
    model: nn.Module,
    plan: StagePlan,
    bounds: tuple[int, ...],
    schedule: PipelineSchedule,
    num_stages: int,
    num_chunks: int,
    num_microbatches: int | None = None,
) -> str:
    """Return a stage plan as a table with a line per chunk, in model order.

    Args:
        model: The full model, before it is partitioned.
        plan: Result of `choose_stage_plan`.
        bounds: Result of `partition_layers`.
        schedule: Schedule, which assigns chunks to stages.
        num_stages: Number of stages.
        num_chunks: Model chunks per stage.
        num_microbatches: Microbatches per step, from which the bubble is computed; optional.
    """
    costs = chunk_costs(model, plan, bounds)
    total = sum(costs) or 1.0
    rows: list[tuple[str, ...]] = []
    for position, cost in enumerate(costs):
        stage, chunk = schedule.place(position, num_stages)
        units = plan.layers[bounds[position] : bounds[position + 1]]
        outside = [name for name, gap in plan.gaps.items() if position_of_gap(gap, bounds) == position]
        number, size = _size_of(model, (*units, *outside))
        span = units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]} ({len(units)})"
        rows.append(
            (
                *(str(stage), str(chunk), span, ", ".join(outside) or "-"),
                *(f"{number:,}", f"{size / 2**20:,.2f}", f"{cost / total:.1%}"),
            )
        )
    lines = _aligned([_HEADER, *rows])
    lines.append(f"plan: {plan.source}")
    lines.append(_schedule_line(schedule, num_stages, num_chunks, num_microbatches))
    lines.extend(_shared_lines(model, plan, bounds, schedule, num_stages))
    if plan.skip_outputs:
        lines.append(f"sent on to all later stages: the output of {', '.join(plan.skip_outputs)}")
    return "\n".join(lines)


def _size_of(model: nn.Module, names: Iterable[str]) -> tuple[int, int]:
    """Return number and bytes of the parameters of modules, tied ones once."""
    held = {id(parameter): parameter for name in names for _, parameter in parameters_below(model, name)}
    number = sum(parameter.numel() for parameter in held.values())
    return number, sum(parameter.numel() * parameter.element_size() for parameter in held.values())


def _schedule_line(schedule: PipelineSchedule, num_stages: int, num_chunks: int, num_microbatches: int | None) -> str:
    line = f"schedule: {schedule.name}, {num_stages} stages"
    if num_chunks > 1:
        line += f" of {num_chunks} chunks"
    if num_microbatches is None:
        return line
    waiting = simulate(schedule, num_stages, num_microbatches, num_chunks).bubble_fraction
    return f"{line}, {num_microbatches} microbatches: stages wait {waiting:.1%} of the time if all pieces cost the same"


def _shared_lines(
    model: nn.Module, plan: StagePlan, bounds: tuple[int, ...], schedule: PipelineSchedule, num_stages: int
) -> list[str]:
    """Return lines about the parameters on more than one stage."""
    stages: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}

    def hold(name: str, position: int) -> None:
        for full, parameter in parameters_below(model, name):
            stages.setdefault(id(parameter), set()).add(schedule.place(position, num_stages)[0])
            if full not in names.setdefault(id(parameter), []):
                names[id(parameter)].append(full)

    for index, name in enumerate(plan.layers):
        hold(name, position_of_gap(index, bounds))
    for name, gap in plan.gaps.items():
        hold(name, position_of_gap(gap, bounds))
    lines = [f"held by all stages: {name}" for name in shared_parameter_names(model, plan)]
    for key, holders in stages.items():
        if len(holders) > 1:
            lines.append(f"held by stages {', '.join(map(str, sorted(holders)))}: {' = '.join(names[key])}")
    return lines


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return [
        "  ".join(
            cell.ljust(widths[column]) if column < _NUM_TEXTS else cell.rjust(widths[column])
            for column, cell in enumerate(row)
        )
        for row in rows
    ]
