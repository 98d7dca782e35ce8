"""What `booster check` found, as lines for people and as one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding", "Section", "as_json", "as_text", "problems_of"]

_NAME_WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What it is.
        text: What was found, for people.
        facts: The same for programs; values that JSON knows.
        problem: What is wrong and what to do, where the project can't work like this; else None.
    """

    name: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Findings under one title."""

    title: str
    findings: Sequence[Finding]


def problems_of(sections: Sequence[Section]) -> list[str]:
    """Returns what is wrong, in the order in which it was found."""
    return [found.problem for section in sections for found in section.findings if found.problem is not None]


def as_text(sections: Sequence[Section]) -> str:
    """Returns a line for each finding, and last the verdict."""
    lines = []
    for section in sections:
        lines.append(f"{section.title}:")
        lines += [f"  {found.name:<{_NAME_WIDTH}} {found.text}" for found in section.findings]
    problems = problems_of(sections)
    lines.append(f"PROBLEMS: {'; '.join(problems)}" if problems else "OK: everything that was looked at works")
    return "\n".join(lines)


def as_json(sections: Sequence[Section]) -> str:
    """Returns one object: `ok`, `problems`, and for every section an object with the facts by name."""
    problems = problems_of(sections)
    found: dict[str, Any] = {"ok": not problems, "problems": problems}
    for section in sections:
        found[section.title] = {one.name: {**one.facts, "ok": one.problem is None} for one in section.findings}
    return json.dumps(found, indent=2)
