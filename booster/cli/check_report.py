"""Report of `booster check`, as text lines or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_NAME_WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check.

    Attributes:
        name: Name of the checked item.
        text: Result as text.
        data: Result as JSON-serializable values.
        problem: Problem and its remedy, or None if the project works with this.
    """

    name: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Findings of one category."""

    title: str
    findings: Sequence[Finding]


def problems_of(sections: Sequence[Section]) -> list[str]:
    """Return the problems in the order of the checks."""
    return [found.problem for section in sections for found in section.findings if found.problem is not None]


def as_text(sections: Sequence[Section]) -> str:
    """Return a line for each finding, followed by the overall result."""
    lines = []
    for section in sections:
        lines.append(f"{section.title}:")
        lines += [f"  {found.name:<{_NAME_WIDTH}} {found.text}" for found in section.findings]
    problems = problems_of(sections)
    lines.append(f"PROBLEMS: {'; '.join(problems)}" if problems else "OK: all checks passed")
    return "\n".join(lines)


def as_json(sections: Sequence[Section]) -> str:
    """Return a JSON object with `ok`, `problems`, and an object of facts by name for every section."""
    problems = problems_of(sections)
    found: dict[str, Any] = {"ok": not problems, "problems": problems}
    for section in sections:
        found[section.title] = {one.name: {**one.data, "ok": one.problem is None} for one in section.findings}
    return json.dumps(found, indent=2)
