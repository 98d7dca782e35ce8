"""Selection of cases: those of large grids that the default run takes, and the parts of `make test-all`.

The default run has to end in six minutes on two cores. Of each test function with parameters it takes one case, chosen
by a checksum of their names: the same ones in every run, spread over all parameters of all functions. The others are
marked as slow. Of the rules in `surface/` it takes all cases.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import pytest


def leave_cases_to_the_long_run(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that the default run leaves out as slow."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None and "surface/" not in item.nodeid:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        cases.sort(key=lambda case: zlib.crc32(case.name.encode()))
        for case in cases[1:]:
            case.add_marker(pytest.mark.slow)


def select_part(items: list[pytest.Item], part: int, num_parts: int) -> None:
    """Remove the cases of all other parts; parts count from 1. A checksum spreads every grid over all parts."""
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % num_parts == part - 1]
