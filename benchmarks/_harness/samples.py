"""The statistics of paired samples: pure functions from lists of numbers to the figures of a report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Samples",
    "Spread",
    "largest_difference",
    "median_interval",
    "order_of_round",
    "paired_differences",
    "paired_ratios",
]


_Z_95 = 1.96  # of the normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where some numbers lie.

    Attributes:
        first: The first quartile.
        median: The second.
        third: The third.
        low: Lower end of the 95% confidence interval of the median.
        high: Its upper end.
    """

    first: float
    median: float
    third: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of the values; quartiles are interpolated between them.

        Raises:
            ValueError: There are no values.
        """
        if not values:
            raise ValueError("no samples: run at least one step after the warm-up")
        low, high = median_interval(values)
        several = values if len(values) > 1 else [*values, *values]
        first, median, third = statistics.quantiles(several, n=4, method="inclusive")
        return cls(first=first, median=median, third=third, low=low, high=high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% confidence interval of the median, by order statistics: it assumes nothing about the noise.

    The number of samples below the true median is binomial with p = 1/2; here in its normal approximation, rounded
    outwards. Over few samples the interval is all of them.
    """
    ordered, count = sorted(values), len(values)
    half_width = _Z_95 * math.sqrt(count) / 2
    below = max(0, math.floor(count / 2 - half_width) - 1)
    above = min(count - 1, math.ceil(count / 2 + half_width))
    return ordered[below], ordered[above]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What one engine did on one rank.

    Attributes:
        seconds: Duration of every step after the warm-up.
        losses: Loss of every step, the warm-up's too.
    """

    seconds: list[float]
    losses: list[float]


def order_of_round(names: Sequence[str], index: int) -> list[str]:
    """Returns the order in which the engines step in one round.

    Over `2 * len(names)` rounds every engine stands at every place equally often, and no engine always follows the
    same other one, whose leavings in the caches it would find.
    """
    turns, shift = divmod(index, len(names))
    rotated = [*names[shift:], *names[:shift]]
    return rotated if turns % 2 == 0 else rotated[::-1]


def paired_ratios(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Returns the engine's time over the baseline's, step by step."""
    return [ours / theirs for ours, theirs in zip(seconds, baseline, strict=True)]


def paired_differences(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Returns the engine's time minus the baseline's, step by step, in seconds."""
    return [ours - theirs for ours, theirs in zip(seconds, baseline, strict=True)]


def largest_difference(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the largest absolute difference of two series of losses; inf where only one of them is finite."""
    return max((_difference(ours, theirs) for ours, theirs in zip(losses, baseline, strict=True)), default=0.0)


def _difference(ours: float, theirs: float) -> float:
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    difference = abs(ours - theirs)
    return math.inf if math.isnan(difference) else difference
