"""Reads what a Monitor has logged."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from booster.errors import ConfigError

__all__ = ["Run", "read_run", "record_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The steps of one log.

    Attributes:
        name: For a legend.
        records: By step, in their order. Of a step that was logged twice, by a run that went back to a checkpoint, the
            later record counts, with what the user added to it.
        num_broken: Lines that are no records, such as the last one of a run that was killed.
    """

    name: str
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_broken: int = 0

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps that have a number of this name, and the numbers; of a list the largest."""
        steps, numbers = [], []
        for step, record in self.records.items():
            value = record.get(name)
            value = max(value, default=None) if isinstance(value, list) else value
            if isinstance(value, (int, float, str)):
                steps.append(step)
                numbers.append(float(value))
        return steps, numbers


def read_run(path: str | os.PathLike[str], name: str | None = None) -> Run:
    """Returns the run that a file of JSON lines holds.

    Args:
        path: What `Monitor(log=)` was given.
        name: None: the file's, without its ending.

    Raises:
        ConfigError: There is no such file, or nothing in it is a record of a step.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} can't be read ({error}): give a file that Monitor(log=...) has written"
        ) from error
    found = [(line, record_of(line)) for line in lines if line.strip()]
    records: dict[int, dict[str, Any]] = {}
    for _, record in found:
        if record is not None:
            _add(records, record)
    if not records:
        what = "is empty" if not found else f"has no record of a step in its {len(found)} lines"
        raise ConfigError(f"{str(path)!r} {what}: give a file that Monitor(log=...) has written")
    num_broken = sum(record is None for _, record in found)
    return Run(name=name or path.stem, records=dict(sorted(records.items())), num_broken=num_broken)


def record_of(line: str) -> dict[str, Any] | None:
    """Returns the record that a line holds; None where it is none."""
    try:
        record = json.loads(line)
    except ValueError:  # a line that broke off, or another kind of file
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int and _has_numbers(record)
    return record if is_record else None


def _has_numbers(record: dict[str, Any]) -> bool:
    def is_number(value: Any) -> bool:
        return value is None or isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")

    def fits(value: Any) -> bool:
        if isinstance(value, dict):
            return all(is_number(one) for one in value.values())
        return all(is_number(one) for one in value) if isinstance(value, list) else is_number(value)

    return all(fits(value) for value in record.values())


def _add(records: dict[int, dict[str, Any]], record: dict[str, Any]) -> None:
    step, is_of_step = record["step"], "seconds" in record
    # What was logged of this step or later ones before is of a part of the run that was done again.
    while records and next(reversed(records)) >= step + (not is_of_step):
        records.popitem()
    records.setdefault(step, {}).update(record)
