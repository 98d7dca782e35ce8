"""Patterns of module names, as plans have them: `*` stands for one part of a name, such as a layer's number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = ["generalized", "match_names", "matches"]

_Value = TypeVar("_Value")


def generalized(name: str) -> str:
    """Returns a module's name with its numbers as `*`: the pattern of all layers that are like it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern is that of a name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]*"), name) is not None


def match_names(
    plan: Mapping[str, _Value], names: Iterable[str], prefix: str = ""
) -> tuple[dict[str, _Value], list[str]]:
    """Finds what a plan says of each name.

    A pattern may leave out the name of the module that holds everything (`model.`), or have it where there is none.
    Where several patterns match a name, that with fewer stars counts, and of such the later one.

    Args:
        plan: What is said of the modules of a pattern.
        names: Of all modules, in order.
        prefix: Name of the base model in a model with a head; "": not known.

    Returns:
        What is said of the names that match, in their order; and the patterns that match nothing.
    """
    names = list(names)
    found: dict[str, tuple[int, _Value]] = {}
    unmatched = []
    for pattern, value in plan.items():
        hits = _hits(pattern, names, prefix)
        if not hits:
            unmatched.append(pattern)
        num_stars = pattern.count("*")
        for name in hits:
            if name not in found or num_stars <= found[name][0]:
                found[name] = (num_stars, value)
    return {name: found[name][1] for name in names if name in found}, unmatched


def _hits(pattern: str, names: list[str], prefix: str) -> list[str]:
    spellings = [pattern, f"{prefix}.{pattern}" if prefix else f"*.{pattern}"]
    if prefix and pattern.startswith(f"{prefix}."):
        spellings.append(pattern.removeprefix(f"{prefix}."))
    for spelling in spellings:
        if hits := [name for name in names if name and matches(spelling, name)]:
            return hits
    return []
