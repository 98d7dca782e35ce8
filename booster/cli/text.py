"""Counts and sizes in the output of commands; free of torch, for commands that do not import it."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(num_bytes: float) -> str:
    """Format a size with a decimal unit."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes /= 1000
        unit += 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.2f} {_UNITS[unit]}"


def count_text(count: int, noun: str) -> str:
    """Format a count and its noun, in the plural unless it is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
