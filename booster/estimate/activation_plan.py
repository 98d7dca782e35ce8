"""Schedule of activation checkpointing with which a training fits a device, and recomputes the least."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import nn

from booster.activation_checkpointing import checkpoint_activations, layers_without_policy
from booster.core.activation_budget import LayerCost, MeasuredLayers
from booster.core.activation_chain import (
    Chain,
    ChainStage,
    Items,
    schedule_bytes,
    smallest_schedule,
    solve_chain,
    stages_of,
)
from booster.core.activation_policy import checkpoint_layer
from booster.core.activation_schedule import ActivationSchedule, names_of
from booster.core.layer_stacks import layers_of
from booster.interface import MixedPrecision, Plugin

from .allocation_tracker import MemoryParts
from .estimate import MemoryEstimate, Simulator, TrainingRecipe
from .machine_profile import MachineProfile
from .repeated_layers import extrapolate, find_repeated_layers
from .simulation import backward_segment, layer_segment
from .step_time import StepTime

# Note [Activation plan]
# The training is simulated with all layers recomputed. Each layer's inputs and what it saves are measured, and the peak
# of the rank's whole memory in its forward and in its backward. What a peak has beyond the inputs that wait and the
# layer's own activations does not depend on the schedule: parameters, states, the gradients that are there by then,
# buffers, temporaries. It is counted as temporaries of the chain's stage, so that the chain's memory is the rank's, and
# the device's memory is the budget.
# A model of identical layers is simulated with a few of them, twice, and the peaks of the others follow: they grow
# evenly with the number of layers and from one layer to the next. The estimate is then the chain's, which is the
# simulated one with all layers recomputed and with none, and between them what the schedule changes. Other models are
# simulated under the schedule, and the budget is corrected until that fits.
_MAX_SIMULATIONS = 5
_MIN_LAYERS = 3  # of a rank: the first, the last and one between
_CLOSE = 0.01  # of the device's memory: not worth another simulation
T = TypeVar("T")


def plan_activations(
    recipe: TrainingRecipe,
    plugin: str | Plugin | None,
    *,
    num_ranks: int | None = None,
    settings: Mapping[str, Any] | None = None,
    mixed_precision: str | MixedPrecision | None = None,
    device_memory: int,
    profile: MachineProfile | None = None,
) -> tuple[ActivationSchedule | None, MemoryEstimate]:
    """Return the activation schedule that recomputes the least such that a training fits, and its estimate.

    Args:
        recipe: What is trained.
        plugin: As for `estimate_memory`.
        num_ranks: As for `estimate_memory`.
        settings: As for `estimate_memory`.
        mixed_precision: As for `estimate_memory`.
        device_memory: Available memory per rank in bytes.
        profile: Speed of the machine, for times of layers, optional: floating-point operations are compared without it.

    Returns:
        The schedule for `checkpoint_activations(model, "schedule", schedule=...)`, or None if nothing needs to be
        recomputed, and the estimate. If nothing fits, the fastest schedule within 1 % of the least memory, whose
        estimate does not fit.

    Raises:
        ConfigError: As of `estimate_memory`; or the model does not fit and has no layers, or they are checkpointed.

    Collective: as `estimate_memory`.
    """
    simulator = Simulator.of(
        recipe, plugin, num_ranks=num_ranks, settings=settings, mixed_precision=mixed_precision, profile=profile
    )
    kept = simulator.estimate(device_memory)
    if kept.fits:
        return None, kept
    all_names = list(layers_without_policy(recipe.model))
    chains = _measure(simulator)
    if all(one.is_extrapolated for one in chains):
        return _plan_extrapolated(all_names, chains, kept, device_memory)

    def simulated(schedule: ActivationSchedule) -> MemoryEstimate:
        follow = partial(checkpoint_activations, policy="schedule", schedule=schedule)
        return replace(simulator, recipe=replace(recipe, change_model=follow)).estimate(device_memory)

    return _plan_simulated(all_names, chains, kept, device_memory, simulated)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankChain:
    """Chain of the layers of a rank, whose memory is the rank's; see Note [Activation plan].

    Attributes:
        names: Names of its layers.
        chain: Its stages, without `fixed_bytes`.
        fixed_bytes: Memory that is there at every point.
        peak: Memory with all layers recomputed, at the largest peak of forward and backward.
        start: Peak before the first layer.
        sent: Bytes sent with all layers recomputed.
        is_extrapolated: If True, a few of its layers were simulated.
    """

    names: tuple[str, ...]
    chain: Chain
    fixed_bytes: int
    peak: MemoryParts
    start: MemoryParts
    sent: int
    is_extrapolated: bool = False

    def num_bytes(self, items: Items) -> int:
        return max(self.fixed_bytes + schedule_bytes(self.chain, items), self.start.total)

    def solve(self, budget_bytes: int) -> Items | None:
        """Return the schedule of the least time within a budget for the rank's whole memory."""
        solution = solve_chain(self.chain, budget_bytes - self.fixed_bytes)
        return None if solution is None else solution.items


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulated:
    """Costs, forward work and peaks of layers that are all recomputed, in the order in which they run."""

    costs: list[LayerCost]
    work: list[float]
    forward: list[MemoryParts]
    backward: list[MemoryParts]
    start: MemoryParts
    end: MemoryParts
    sent: int


def _measure(simulator: Simulator) -> list[_RankChain]:
    """Simulate the training with all layers recomputed, on one rank of each pipeline stage."""
    stack = _stack_to_extrapolate(simulator.recipe.model, simulator.layer_divisor)
    found: list[_RankChain] = []
    for rank in simulator.ranks:
        chain = None if stack is None else _extrapolated_chain(simulator, rank, stack)
        if chain is None:
            chain = _chain_of(*_simulate(simulator, rank, None), has_segments=not simulator.gathers_layers)
        found.append(chain)
    return found


def _stack_to_extrapolate(model: nn.Module, unit: int) -> str | None:
    """Return the name of a list of identical layers that has all layers of the model, as many on each stage."""
    stack = find_repeated_layers(model)
    names = list(layers_of(model))
    if stack is None or any(name.rpartition(".")[0] != stack for name in names) or len(names) % unit:
        return None
    return stack


def _extrapolated_chain(simulator: Simulator, rank: int, stack: str) -> _RankChain | None:
    """Return the chain of a rank from two simulations of fewer layers; None if that is not possible."""
    unit, all_names = simulator.layer_divisor, list(layers_of(simulator.recipe.model))
    count = len(all_names) // unit  # of the rank
    few = _MIN_LAYERS + (count - _MIN_LAYERS) % 2
    counts = (few, few + 2)
    if counts[1] >= count:
        return None
    try:
        runs = [_simulate(simulator, rank, (stack, unit * one)) for one in counts]
    except Exception:  # any error of a model that depends on its layers: the full run reports real ones
        return None
    block = all_names.index(runs[0][0][0]) // few
    if any(names != all_names[block * one : (block + 1) * one] for (names, _), one in zip(runs, counts, strict=True)):
        return None  # several parts of the model
    share = (count - counts[0]) / (counts[1] - counts[0])
    deep = _extrapolated(runs[0][1], runs[1][1], share, count)
    names = all_names[block * count : (block + 1) * count]
    return replace(_chain_of(names, deep, has_segments=not simulator.gathers_layers), is_extrapolated=True)


def _simulate(simulator: Simulator, rank: int, layers: tuple[str, int] | None) -> tuple[list[str], _Simulated]:
    """Return the names of the rank's layers, in the order in which they run, and what was measured of them."""
    policies: list[MeasuredLayers] = []

    def measure_layers(model: nn.Module) -> None:
        found = layers_without_policy(model)
        policies.append(MeasuredLayers(list(found)))
        for name, layer in found.items():
            checkpoint_layer(layer, policies[-1], name)

    changed = replace(simulator, recipe=replace(simulator.recipe, change_model=measure_layers))
    simulated = changed.run(rank, layers, by_layer=True)
    costs, segments = policies[-1].local_costs, simulated.segments
    names = sorted(costs, key=lambda name: costs[name].position)
    return names, _Simulated(
        costs=[costs[name] for name in names],
        work=[simulated.forward_work[layer_segment(name)] for name in names],
        forward=[segments[layer_segment(name)] for name in names],
        backward=[segments[backward_segment(name)] for name in names],
        start=segments["start"],
        end=segments["end"],
        sent=simulated.memory.sent,
    )


def _extrapolated(few: _Simulated, more: _Simulated, share: float, num_layers: int) -> _Simulated:
    def repeated(values: list[T]) -> list[T]:
        return [values[0], *([values[1]] * (num_layers - 2)), values[-1]]

    def all_layers(low: list[MemoryParts], high: list[MemoryParts]) -> list[MemoryParts]:
        first, second, before_last, last = (extrapolate(low[index], high[index], share) for index in (0, 1, -2, -1))
        inner = [extrapolate(second, before_last, float(one)) for one in np.linspace(0.0, 1.0, num_layers - 2)]
        return [first, *inner, last]

    return _Simulated(
        costs=repeated(more.costs),
        work=repeated(more.work),
        forward=all_layers(few.forward, more.forward),
        backward=all_layers(few.backward, more.backward),
        **{name: extrapolate(getattr(few, name), getattr(more, name), share) for name in ("start", "end", "sent")},
    )


def _chain_of(names: Sequence[str], simulated: _Simulated, *, has_segments: bool) -> _RankChain:
    costs = simulated.costs
    waiting = np.cumsum([cost.input_bytes * cost.num_live for cost in costs])
    has_many = any(cost.num_live > 1 for cost in costs)
    forward, backward = [], []
    for index, cost in enumerate(costs):
        held = int(waiting[-1] if has_many else waiting[index])
        output = costs[index + 1].input_bytes if index + 1 < len(costs) else 0
        forward.append(simulated.forward[index].total - held - output)
        backward.append(simulated.backward[index].total - held - cost.kept_bytes)
    end = simulated.end.total - int(waiting[-1])
    fixed = max(0, min(*forward, *backward, end))
    stages = tuple(
        ChainStage(
            input_bytes=cost.input_bytes,
            kept_bytes=cost.kept_bytes,
            forward_bytes=max(0, forward[index] - fixed),
            backward_bytes=max(0, backward[index] - fixed),
            forward_time=max(simulated.work[index], 1e-12),
            num_live=cost.num_live,
            is_chained=has_segments and (not cost.num_unchained or index == 0),
        )
        for index, cost in enumerate(costs)
    )
    every = [*simulated.forward, *simulated.backward, simulated.start, simulated.end]
    return _RankChain(
        names=tuple(names),
        chain=Chain(stages=stages, end=ChainStage(forward_bytes=max(0, end - fixed))),
        fixed_bytes=fixed,
        peak=max(every, key=lambda parts: parts.total),
        start=simulated.start,
        sent=simulated.sent,
    )


def _plan_extrapolated(
    all_names: Sequence[str], ranks: Sequence[_RankChain], kept: MemoryEstimate, device_memory: int
) -> tuple[ActivationSchedule, MemoryEstimate]:
    all_items = [rank.solve(device_memory) or _nearly_smallest(rank) for rank in ranks]
    schedule = _joined(all_names, ranks, all_items)
    assert schedule is not None
    sizes = [rank.num_bytes(items) for rank, items in zip(ranks, all_items, strict=True)]
    most = sizes.index(max(sizes))
    peak = ranks[most].peak
    share = schedule.num_recomputations / len(schedule.names)
    memory = replace(
        kept.memory,
        backward=replace(peak, activations=max(0, peak.activations + sizes[most] - peak.total)),
        sent=round(kept.sent + share * (max(rank.sent for rank in ranks) - kept.sent)),
        time=None if kept.step_time is None else _with_recomputation(kept.step_time, ranks, all_items),
    )
    return schedule, replace(kept, memory=memory)


def _with_recomputation(time: StepTime, ranks: Sequence[_RankChain], all_items: Sequence[Items]) -> StepTime:
    """Return the time of a step with the recomputations of the rank that has the most."""

    def again(rank: _RankChain, items: Items) -> float:
        inner = [item for item in items if not isinstance(item, int)]
        stages = rank.chain.stages
        return sum(sum(stages[one].forward_time for one in stages_of(item)) + again(rank, item) for item in inner)

    if len(ranks) == 1:
        seconds = again(ranks[0], all_items[0])
    else:  # a forward is one of several microbatches: backward takes about twice its time
        shares = [
            again(rank, items) / (3 * sum(one.forward_time for one in rank.chain.stages))
            for rank, items in zip(ranks, all_items, strict=True)
        ]
        seconds = time.model * max(shares)
    return replace(time, model=time.model + seconds, computation=time.computation + seconds)


def _plan_simulated(
    all_names: Sequence[str],
    chains: Sequence[_RankChain],
    kept: MemoryEstimate,
    device_memory: int,
    simulated: Callable[[ActivationSchedule], MemoryEstimate],
) -> tuple[ActivationSchedule, MemoryEstimate]:
    """Solve, simulate and correct the budget by what the simulation has more or less."""
    budget, best = device_memory, None
    for _ in range(_MAX_SIMULATIONS):
        schedule = _joined(all_names, chains, [one.solve(budget) for one in chains])
        if schedule is None or (best is not None and schedule.num_recomputations >= best[0].num_recomputations):
            break
        estimate = simulated(schedule) if schedule.recomputed else kept
        if estimate.fits:
            best = schedule, estimate
            if device_memory - estimate.total < _CLOSE * device_memory:
                break
        elif best is not None:
            break
        budget += device_memory - estimate.total
    if best is not None:
        return best
    smallest = _joined(all_names, chains, [_nearly_smallest(one) for one in chains])
    assert smallest is not None
    return smallest, simulated(smallest)


def _joined(
    all_names: Sequence[str], ranks: Sequence[_RankChain], all_items: Sequence[Items | None]
) -> ActivationSchedule | None:
    """Return the schedule of all stages of a pipeline; None if one has none.

    Stages that are not measured need no more memory than the second one, and have its schedule.
    """
    joined: list[Any] = []
    for rank, items in zip(ranks, all_items, strict=True):
        if items is None:
            return None
        joined += ActivationSchedule.of_chain(items, rank.names).items
    measured = {name for rank in ranks for name in rank.names}
    others = [name for name in all_names if name not in measured]
    like = all_items[1 if len(ranks) > 1 else 0]
    assert like is not None
    count = len(stages_of(like))
    for start in range(0, len(others), count):
        names = others[start : start + count]
        first = all_names.index(names[0])
        is_stage = len(names) == count and list(all_names[first : first + count]) == names
        joined += ActivationSchedule.of_chain(like, names).items if is_stage else [(name,) for name in names]
    return ActivationSchedule(tuple(sorted(joined, key=lambda item: all_names.index(names_of(item)[0]))))


def _nearly_smallest(rank: _RankChain) -> Items:
    """Return a schedule of about the least memory: the very least may repeat each forward many times."""
    least = rank.num_bytes(smallest_schedule(rank.chain).items)
    return rank.solve(round((1 + _CLOSE) * least)) or smallest_schedule(rank.chain).items
