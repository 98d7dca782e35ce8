"""Patterns of module names: `*` matches one component of a name, such as a layer's index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = ["generalize", "match_names", "matches"]

_Value = TypeVar("_Value")


def generalize(name: str) -> str:
    """Return a module's name with its indices replaced by `*`, the pattern of all layers like it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]*"), name) is not None


def match_names(
    plan: Mapping[str, _Value], names: Iterable[str], prefix: str = ""
) -> tuple[dict[str, _Value], list[str]]:
    """Match module names with the patterns of a plan.

    A pattern may omit the name of the base model (`model.`), or contain it where the model has none. If several
    patterns match a name, the one with fewer stars wins, and among equals the last one.

    Args:
        plan: Values by pattern.
        names: Names of all modules, in order.
        prefix: Name of the base model in a model with a head; optional, defaults to unknown.

    Returns:
        The values of matching names, in the names' order; and the patterns that match nothing.
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
    candidates = [pattern, f"{prefix}.{pattern}" if prefix else f"*.{pattern}"]
    if prefix and pattern.startswith(f"{prefix}."):
        candidates.append(pattern.removeprefix(f"{prefix}."))
    for spelling in candidates:
        if hits := [name for name in names if name and matches(spelling, name)]:
            return hits
    return []
