"""What the simulator says of each schedule, beside the formula of its paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from _harness.table import align

__all__ = ["CASES", "Simulated", "simulate_all", "simulated_table"]

_EXACT = 1e-9


def _fraction(wait: float, num_microbatches: int) -> float:
    """Returns the share of a step in which a stage waits, from its wait in times of a microbatch."""
    return wait / (num_microbatches + wait)


# By schedule: from stages p, microbatches m and chunks v to the bubble's share of the step, where forward, gradients
# of inputs and those of weights take equally long. ZB-V has only the last stage's wait for its first microbatch, a
# forward of half a stage for each stage before it. That takes m >= 2 p: with fewer it can't fill its V.
_FORMULAS: dict[str, Callable[[int, int, int], float]] = {
    "gpipe": lambda p, m, v: _fraction(p - 1, m),
    "1f1b": lambda p, m, v: _fraction(p - 1, m),
    "interleaved": lambda p, m, v: _fraction((p - 1) / v, m),
    "zbv": lambda p, m, v: _fraction((p - 1) / 6, m),
}

_SHAPES = ((2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32))
_CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 4), "zbv": (2,)}

CASES = [(name, p, m, v) for name, several in _CHUNKS.items() for v in several for p, m in _SHAPES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A schedule with some numbers.

    Attributes:
        schedule: Its name.
        num_stages: p.
        num_microbatches: m.
        num_chunks: v, on each stage.
        bubble: Share of the step in which stages wait, as simulated.
        formula: The same from the formula.
        peak_live: By stage, the most activations kept, in microbatches of a whole stage.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    bubble: float
    formula: float
    peak_live: tuple[float, ...]

    @property
    def agrees(self) -> bool:
        """True where simulation and formula are the same but for rounding."""
        return math.isclose(self.bubble, self.formula, abs_tol=_EXACT)


def simulate_all(cases: Sequence[tuple[str, int, int, int]] = tuple(CASES)) -> list[Simulated]:
    """Returns what comes of each case."""
    from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import schedule_from_name, simulate

    results = []
    for name, p, m, v in cases:
        timeline = simulate(schedule_from_name(name), p, m, v)
        results.append(
            Simulated(
                schedule=name,
                num_stages=p,
                num_microbatches=m,
                num_chunks=v,
                bubble=timeline.bubble_fraction,
                formula=_FORMULAS[name](p, m, v),
                peak_live=tuple(live / v for live in timeline.peak_pending),
            )
        )
    return results


def simulated_table(results: Sequence[Simulated]) -> str:
    """Returns the cases for people to read."""
    rows: list[list[Any]] = [["schedule", "p", "m", "v", "bubble", "formula", "", "live, first stage", "last stage"]]
    for one in results:
        numbers = [one.num_stages, one.num_microbatches, one.num_chunks]
        shares = [f"{one.bubble:.4%}", f"{one.formula:.4%}", "" if one.agrees else "MISMATCH"]
        rows.append([one.schedule, *map(str, numbers), *shares, f"{one.peak_live[0]:g}", f"{one.peak_live[-1]:g}"])
    return "\n".join(["simulated bubbles, and live activations in microbatches of a stage", *align(rows)])
