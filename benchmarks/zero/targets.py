"""Targets of benchmarks/zero: at most so much of a peer's step, at most so much of the formula's memory."""

from __future__ import annotations

from collections.abc import Sequence

from _harness.pair import Comparison
from _harness.targets import Target, at_most
from zero.engines import BASELINE, REDUNDANCY, STAGES, deepspeed_name, our_name
from zero.fsdp import manual_name, plugin_name
from zero.manual import STRATEGIES
from zero.memory import MemoryRow

__all__ = ["memory_targets", "speed_targets", "wrapper_targets"]

_OVER_BASELINE = {("50m", "fp32"): 0.95, ("50m", "bf16"): 0.85}  # by size and precision
_OVER_BASELINE_ELSE = 1.00
_OVER_DEEPSPEED = 0.80
_OVER_REDUNDANCY = 0.95
_OVER_FORMULA = 1.05
_OVER_BY_HAND = {"50m": 0.75}  # by size
_OVER_BY_HAND_ELSE = 1.02
_OVER_OUR_COLLECTIVES = 1.02


def speed_targets(comparison: Comparison, size: str, precision: str) -> list[Target]:
    """Returns the targets of the stages that were asked for; those over a peer only where it was measured."""
    targets = []
    over_baseline = _OVER_BASELINE.get((size, precision), _OVER_BASELINE_ELSE)
    for stage in _asked_stages(comparison):
        targets.append(at_most(comparison, our_name(stage), BASELINE, over_baseline))
        if precision == "fp32":
            peers = {deepspeed_name(stage): _OVER_DEEPSPEED, REDUNDANCY: _OVER_REDUNDANCY}
            targets += [
                at_most(comparison, our_name(stage), peer, high)
                for peer, high in peers.items()
                if _is_measured(comparison, peer)
            ]
    return targets


def memory_targets(comparison: Comparison, rows: Sequence[MemoryRow]) -> list[Target]:
    """Returns a target for every stage that was asked for; one without figures is not met."""
    shares = {row.name: row.share for row in rows}
    return [
        Target(
            what=f"peak memory of {our_name(stage)} over its formula, {comparison.title}",
            value=shares.get(our_name(stage)),
            high=_OVER_FORMULA,
        )
        for stage in _asked_stages(comparison)
    ]


def wrapper_targets(comparison: Comparison, size: str, precision: str) -> list[Target]:
    """Returns how much of FSDP2's step by hand the plugin may take: in the same run, with the same precision.

    The second one of a strategy leaves our collectives out of it: there the other has them too.
    """
    asked = {engine.name for engine in comparison.engines}
    highest = {False: _OVER_BY_HAND.get(size, _OVER_BY_HAND_ELSE), True: _OVER_OUR_COLLECTIVES}
    targets = [
        (plugin_name(strategy), manual_name(strategy, has_our_collectives=has_ours), high)
        for strategy in STRATEGIES
        for has_ours, high in highest.items()
    ]
    return [at_most(comparison, ours, twin, high) for ours, twin, high in targets if {ours, twin} <= asked]


def _asked_stages(comparison: Comparison) -> list[int]:
    asked = {engine.name for engine in comparison.engines}
    return [stage for stage in STAGES if our_name(stage) in asked]


def _is_measured(comparison: Comparison, name: str) -> bool:
    return any(engine.name == name and engine.figures is not None for engine in comparison.engines)
