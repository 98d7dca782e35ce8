"""Targets: a measured number, the bounds it should lie in, and what is printed about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from _harness.pair import Comparison

__all__ = ["Target", "at_most", "print_targets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One number to reach.

    Attributes:
        what: What was measured.
        value: The figure; None: it could not be measured, which fails the check.
        low: The least that is good.
        high: The most that is good.
        unit: Printed after the numbers.
        interval: 95% confidence interval of the figure; None: it is exact.
        control: The same figure of the baseline against itself, for the reader to judge the noise by.
    """

    what: str
    value: float | None
    low: float = float("-inf")
    high: float = float("inf")
    unit: str = ""
    interval: tuple[float, float] | None = None
    control: float | None = None

    @property
    def verdict(self) -> str:
        """PASS within the bounds, which belong to them; else FAIL, or NOISY where the noise could hide a pass."""
        if self.value is None:
            return "FAIL"
        if self.low <= self.value <= self.high:
            return "PASS"
        least, most = self.interval or (self.value, self.value)
        return "NOISY" if least <= self.high and most >= self.low else "FAIL"

    @property
    def is_met(self) -> bool:
        """True for PASS alone."""
        return self.verdict == "PASS"

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g}{self.unit}"
        interval = "" if self.interval is None else f" [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        control = "" if self.control is None else f", control {self.control:.4g}{self.unit}"
        return f"{self.verdict:5}  {self.what}: {value}{interval} (target {self._bounds()}{control})"

    def _bounds(self) -> str:
        if self.low == float("-inf"):
            return f"at most {self.high:g}{self.unit}"
        if self.high == float("inf"):
            return f"at least {self.low:g}{self.unit}"
        return f"{self.low:g} to {self.high:g}{self.unit}"


def at_most(comparison: Comparison, name: str, over: str, high: float) -> Target:
    """Returns the target of an engine's time over another one's; not met where one of them was not measured."""
    ratio, control = comparison.ratio(name, over), comparison.control.figures
    return Target(
        what=f"{name} over {over}, {comparison.title}",
        value=None if ratio is None else ratio.median,
        high=high,
        interval=None if ratio is None else (ratio.low, ratio.high),
        control=None if control is None else control.ratio.median,
    )


def print_targets(targets: Sequence[Target]) -> bool:
    """Prints a line per target; returns True if all are met."""
    for target in targets:
        print(target)
    return all(target.is_met for target in targets)
