"""Goals: a measured number, the bounds it should lie in, and what is printed about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Goal", "print_goals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One number to reach.

    Attributes:
        what: What was measured.
        value: The figure; None: it could not be measured, which is no pass.
        low: The least that is good.
        high: The most that is good.
        unit: Printed after the numbers.
        control: The same figure of the baseline against itself, for the reader to judge the noise by.
    """

    what: str
    value: float | None
    low: float = float("-inf")
    high: float = float("inf")
    unit: str = ""
    control: float | None = None

    @property
    def is_met(self) -> bool:
        """True if the figure lies within the bounds, which belong to them."""
        return self.value is not None and self.low <= self.value <= self.high

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g}{self.unit}"
        control = "" if self.control is None else f", control {self.control:.4g}{self.unit}"
        return f"{'PASS' if self.is_met else 'FAIL'}  {self.what}: {value} (goal {self._bounds()}{control})"

    def _bounds(self) -> str:
        if self.low == float("-inf"):
            return f"at most {self.high:g}{self.unit}"
        if self.high == float("inf"):
            return f"at least {self.low:g}{self.unit}"
        return f"{self.low:g} to {self.high:g}{self.unit}"


def print_goals(goals: Sequence[Goal]) -> bool:
    """Prints a line per goal; returns True if all are met."""
    for goal in goals:
        print(goal)
    return all(goal.is_met for goal in goals)
