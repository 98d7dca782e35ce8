"""What benchmarks/zero.py has to show: at most so much of a peer's step, at most so much of the formula's memory."""

from __future__ import annotations

from collections.abc import Sequence

from _goals import Goal
from _pair import Comparison
from _zero_by_hand import STRATEGIES
from _zero_engines import BASELINE, REDUNDANCY, STAGES, deepspeed_name, our_name
from _zero_fsdp import by_hand_name, plugin_name
from _zero_memory import MemoryRow

__all__ = ["memory_goals", "speed_goals", "wrapper_goals"]

_OVER_BASELINE = 1.00
_OVER_DEEPSPEED = 0.80
_OVER_REDUNDANCY = 0.95
_OVER_FORMULA = 1.10
_OVER_BY_HAND = 1.02


def speed_goals(comparison: Comparison, precision: str) -> list[Goal]:
    """Returns the goals of the stages that were asked for; those over a peer only where it was measured."""
    goals = []
    for stage in _asked_stages(comparison):
        goals.append(_at_most(comparison, our_name(stage), BASELINE, _OVER_BASELINE))
        if precision == "fp32":
            peers = {deepspeed_name(stage): _OVER_DEEPSPEED, REDUNDANCY: _OVER_REDUNDANCY}
            goals += [
                _at_most(comparison, our_name(stage), peer, high)
                for peer, high in peers.items()
                if _is_measured(comparison, peer)
            ]
    return goals


def memory_goals(comparison: Comparison, rows: Sequence[MemoryRow]) -> list[Goal]:
    """Returns a goal for every stage that was asked for; one without figures is not met."""
    shares = {row.name: row.share for row in rows}
    return [
        Goal(
            what=f"peak memory of {our_name(stage)} over its formula, {comparison.title}",
            value=shares.get(our_name(stage)),
            high=_OVER_FORMULA,
        )
        for stage in _asked_stages(comparison)
    ]


def wrapper_goals(comparison: Comparison, precision: str) -> list[Goal]:
    """Returns how much of FSDP2's step by hand the plugin may take: in the same run, with the same precision.

    The second one of a strategy leaves our collectives out of it: there the other has them too.
    """
    asked = {engine.name for engine in comparison.engines}
    pairs = [
        (plugin_name(strategy), by_hand_name(strategy, has_our_collectives=has_ours))
        for strategy in STRATEGIES
        for has_ours in (False, True)
    ]
    return [_at_most(comparison, ours, twin, _OVER_BY_HAND) for ours, twin in pairs if {ours, twin} <= asked]


def _asked_stages(comparison: Comparison) -> list[int]:
    asked = {engine.name for engine in comparison.engines}
    return [stage for stage in STAGES if our_name(stage) in asked]


def _is_measured(comparison: Comparison, name: str) -> bool:
    return any(engine.name == name and engine.figures is not None for engine in comparison.engines)


def _at_most(comparison: Comparison, name: str, over: str, high: float) -> Goal:
    ratio, control = comparison.ratio(name, over), comparison.control.figures
    return Goal(
        what=f"{name} over {over}, {comparison.title}",
        value=None if ratio is None else ratio.median,
        high=high,
        interval=None if ratio is None else (ratio.low, ratio.high),
        control=None if control is None else control.ratio.median,
    )
