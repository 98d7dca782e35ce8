"""Finds the largest number for which something works, with few tries; a pure function of what the tries say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Found", "search_largest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search knows at its end.

    Attributes:
        largest: That worked; 0: none did.
        too_large: The least that did not; None: none was met.
        is_narrowed: The two are as near as was asked for, or what may be tried at most worked.
    """

    largest: int
    too_large: int | None
    is_narrowed: bool


def search_largest(
    works: Callable[[int], bool],
    *,
    first: int,
    most: int,
    growth: float,
    tolerance: float,
    may_go_on: Callable[[], bool],
) -> Found:
    """Tries numbers from 1 on: grows by factors until one does not work, then halves what is between, by factors too.

    Args:
        works: Tries a number. If it works, so do all lower ones.
        first: The guess to begin with.
        most: Not to be exceeded.
        growth: Factor from a number that works to the next, above 1.
        tolerance: Done when the least that did not work is at most this part above the largest that did.
        may_go_on: Asked before every try; False ends the search.
    """
    largest, too_large = 0, None
    guess: int | None = max(1, min(first, most))
    while guess is not None and may_go_on():
        if works(guess):
            largest = guess
        else:
            too_large = guess
        guess = _next_guess(largest, too_large, most, growth, tolerance)
    return Found(largest=largest, too_large=too_large, is_narrowed=guess is None)


def _next_guess(largest: int, too_large: int | None, most: int, growth: float, tolerance: float) -> int | None:
    if too_large is None:
        return None if largest >= most else min(most, max(largest + 1, int(largest * growth)))
    if largest == 0:
        return max(1, int(too_large / growth)) if too_large > 1 else None
    if too_large - largest == 1 or too_large <= largest * (1 + tolerance):
        return None
    return min(max(round(math.sqrt(largest * too_large)), largest + 1), too_large - 1)
