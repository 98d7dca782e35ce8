"""What benchmarks/gemini/run.py has to show: at most so much of a peer's step and memory, models so much larger."""

from __future__ import annotations

from collections.abc import Sequence

from _harness.pair import Comparison
from _harness.targets import Target, at_most
from gemini.engines import BASELINE, DEEPSPEED, FSDP, KEPT, STATES_ON_DISK, STATIC
from zero.memory import MemoryRow

__all__ = ["largest_target", "memory_targets", "speed_targets"]

# Ours, the peer, and the most that ours may take of the peer's step; in fp32, where all do the same arithmetic.
_STEPS = (
    (STATIC, BASELINE, 0.97),
    (STATIC, FSDP, 0.85),
    (STATIC, DEEPSPEED, 0.80),
    (KEPT, BASELINE, 1.02),
    (STATES_ON_DISK, BASELINE, 1.25),
)
_OPTIONAL = (DEEPSPEED,)
_OVER_FORMULA = 1.05
_OVER_FSDP = 1.00
_TIMES_BASELINE = 8.0


def speed_targets(comparison: Comparison, precision: str) -> list[Target]:
    """Returns the targets of the engines that were asked for; those over a peer only where it was asked for too.

    In bf16 there are none: DDP's autocast does other arithmetic.
    """
    if precision != "fp32":
        return []
    asked = {engine.name for engine in comparison.engines}
    absent = {engine.name for engine in comparison.engines if engine.name in _OPTIONAL and engine.figures is None}
    return [
        at_most(comparison, ours, peer, high) for ours, peer, high in _STEPS if ours in asked and peer in asked - absent
    ]


def memory_targets(comparison: Comparison, rows: Sequence[MemoryRow]) -> list[Target]:
    """Returns those of the static placement, where it was asked for; a target without figures is not met."""
    asked = {engine.name for engine in comparison.engines}
    if STATIC not in asked:
        return []
    share = next((row.share for row in rows if row.name == STATIC), None)
    what = f"peak memory of {STATIC} over its formula, {comparison.title}"
    targets = [Target(what=what, value=share, high=_OVER_FORMULA)]
    if FSDP in asked:
        ours, theirs = _peak(comparison, STATIC), _peak(comparison, FSDP)
        ratio = ours / theirs if ours and theirs else None
        what = f"peak memory of {STATIC} over {FSDP}, {comparison.title}"
        targets.append(Target(what=what, value=ratio, high=_OVER_FSDP))
    return targets


def largest_target(ours: int | None, baseline: int | None, limit_bytes: int) -> Target:
    """Returns the target of the largest model that can be trained.

    Args:
        ours: Weights of the largest that we trained; None: none.
        baseline: The same of torch's DDP.
        limit_bytes: Memory that a process had.
    """
    what = f"largest GPT with Gemini over {BASELINE}'s, {limit_bytes / 2**20:.0f} MiB a process"
    return Target(what=what, value=ours / baseline if ours and baseline else None, low=_TIMES_BASELINE)


def _peak(comparison: Comparison, name: str) -> int | None:
    memory = comparison.engine(name).memory
    return None if memory is None else memory.step_peak
