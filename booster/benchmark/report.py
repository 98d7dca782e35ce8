"""Benchmark results as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from booster.benchmark.configurations import LeftOut
from booster.benchmark.outcomes import Outcome
from booster.benchmark.settings import INNER_FACTOR, BenchmarkSettings

__all__ = ["describe", "format_notes", "format_table", "to_json"]

_HEADINGS = ("configuration", "forward", "backward", "step", "total", "memory", "sent", "received", "loss")
_SECONDS = ("forward_seconds", "backward_seconds", "step_seconds", "whole_seconds")
_BYTES = ("peak_bytes", "sent_bytes", "received_bytes")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def describe(settings: BenchmarkSettings, device: str) -> str:
    """Return a one-line description of the benchmark."""
    inner = INNER_FACTOR * settings.hidden
    return (
        f"MLP of {_count(settings.layers, 'layer')} {settings.hidden} -> {inner} -> {settings.hidden}, batch"
        f" {settings.batch} x {_count(settings.sequence, 'token')}, fp32, AdamW, on {device};"
        f" {_count(settings.num_ranks, 'rank')}, median of {_count(settings.profile_steps, 'step')}, largest of the"
        " ranks"
    )


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one row per result."""
    columns: list[list[str]] = [["", *(outcome.configuration.name for outcome in outcomes)]]
    columns += [_column(outcomes, name, "ms", 1e-3) for name in _SECONDS]
    columns += [_column(outcomes, name, *_unit_for(outcomes, name)) for name in _BYTES]
    columns += [["", *(_verdict(outcome) for outcome in outcomes)]]
    titled = [[title, *column] for title, column in zip(_HEADINGS, columns, strict=True)]
    widths = [max(len(text) for text in column) for column in titled]
    return "\n".join(_line(row, widths) for row in zip(*titled, strict=True))


def format_notes(outcomes: Sequence[Outcome], left_out: Sequence[LeftOut]) -> str:
    """Return a line for each skipped or failed configuration; empty if there is none."""
    notes = [f"not measured: {one.name}: {one.reason}" for one in left_out]
    notes += [f"failed: {one.configuration.name}: {one.error}" for one in outcomes if one.error is not None]
    return "\n".join(notes)


def to_json(
    settings: BenchmarkSettings, device: str, outcomes: Sequence[Outcome], left_out: Sequence[LeftOut]
) -> dict[str, Any]:
    """Return settings and results as JSON-serializable data, in seconds and bytes."""
    return {
        "settings": asdict(settings),
        "device": device,
        "configurations": [
            {
                "name": outcome.configuration.name,
                **asdict(outcome.configuration),
                "figures": None if outcome.figures is None else asdict(outcome.figures),
                "loss_difference": _finite(outcome.loss_difference),
                "error": outcome.error,
            }
            for outcome in outcomes
        ],
        "left_out": [{"name": one.name, "reason": one.reason} for one in left_out],
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and abs(number) < float("inf") else None


def _column(outcomes: Sequence[Outcome], name: str, unit: str, size: float) -> list[str]:
    figures = [outcome.figures for outcome in outcomes]
    return [unit, *("" if one is None else f"{getattr(one, name) / size:.2f}" for one in figures)]


def _unit_for(outcomes: Sequence[Outcome], name: str) -> tuple[str, float]:
    """Return the largest unit in which the maximum of a column is at least 1."""
    most = max((getattr(outcome.figures, name) for outcome in outcomes if outcome.figures is not None), default=0)
    return next(((unit, size) for unit, size in _UNITS if most >= size), _UNITS[-1])


def _verdict(outcome: Outcome) -> str:
    if outcome.figures is None:
        return "failed"
    if outcome.error is None:
        return "equal"
    return "not compared" if outcome.loss_difference is None else "WRONG"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        text.ljust(width) if not column else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
