"""Benchmark results as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from booster.benchmark.configurations import Skipped
from booster.benchmark.outcomes import BenchmarkResult
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


def format_table(results: Sequence[BenchmarkResult]) -> str:
    """Return a table with one row per result."""
    columns: list[list[str]] = [["", *(result.configuration.name for result in results)]]
    columns += [_column(results, name, "ms", 1e-3) for name in _SECONDS]
    columns += [_column(results, name, *_unit_for(results, name)) for name in _BYTES]
    columns += [["", *(_loss_status(result) for result in results)]]
    titled = [[title, *column] for title, column in zip(_HEADINGS, columns, strict=True)]
    widths = [max(len(text) for text in column) for column in titled]
    return "\n".join(_line(row, widths) for row in zip(*titled, strict=True))


def format_notes(results: Sequence[BenchmarkResult], skipped: Sequence[Skipped]) -> str:
    """Return a line for each skipped or failed configuration; empty if there is none."""
    notes = [f"not measured: {one.name}: {one.reason}" for one in skipped]
    notes += [f"failed: {one.configuration.name}: {one.error}" for one in results if one.error is not None]
    return "\n".join(notes)


def to_json(
    settings: BenchmarkSettings, device: str, results: Sequence[BenchmarkResult], skipped: Sequence[Skipped]
) -> dict[str, Any]:
    """Return settings and results as JSON-serializable data, in seconds and bytes."""
    return {
        "settings": asdict(settings),
        "device": device,
        "configurations": [
            {
                "name": result.configuration.name,
                **asdict(result.configuration),
                "figures": None if result.metrics is None else asdict(result.metrics),
                "loss_difference": _finite(result.loss_difference),
                "error": result.error,
            }
            for result in results
        ],
        "left_out": [{"name": one.name, "reason": one.reason} for one in skipped],
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and abs(number) < float("inf") else None


def _column(results: Sequence[BenchmarkResult], name: str, unit: str, size: float) -> list[str]:
    metrics = [result.metrics for result in results]
    return [unit, *("" if one is None else f"{getattr(one, name) / size:.2f}" for one in metrics)]


def _unit_for(results: Sequence[BenchmarkResult], name: str) -> tuple[str, float]:
    """Return the largest unit in which the maximum of a column is at least 1."""
    most = max((getattr(result.metrics, name) for result in results if result.metrics is not None), default=0)
    return next(((unit, size) for unit, size in _UNITS if most >= size), _UNITS[-1])


def _loss_status(result: BenchmarkResult) -> str:
    if result.metrics is None:
        return "failed"
    if result.error is None:
        return "equal"
    return "not compared" if result.loss_difference is None else "WRONG"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        text.ljust(width) if not column else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
