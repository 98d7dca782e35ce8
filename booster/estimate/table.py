"""Estimates of all candidates as a table and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from booster.errors import ConfigError
from booster.estimate.comparison import CandidateResult, format_setting, least_communication, least_memory

__all__ = ["bytes_from_text", "format_notes", "format_recommendation", "format_size", "format_table", "to_json"]

_PARTS = ("parameters", "gradients", "optimizer_states", "activations", "buffers")
_BEST_MARK = "  <--"
_HEADINGS = ("parameters", "gradients", "states", "activations", "buffers", "peak", "offloaded", "sent")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SIZES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}

_MIN_UNITLESS_BYTES = 2**20  # a smaller number without unit is taken for a forgotten unit


def bytes_from_text(text: str, option: str) -> int:
    """Parse a size such as 80GiB (2^30 bytes each), 80GB (10^9 bytes each) or 85899345920.

    Args:
        text: Size to parse.
        option: Name of the option, for errors.

    Raises:
        ConfigError: The text is not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = found[2].lower() if found else ""
    if found is None or unit not in _SIZES or float(found[1]) * _SIZES[unit] < (1 if unit else _MIN_UNITLESS_BYTES):
        number = re.match(r"\s*(\d+(?:\.\d+)?)", text)
        hint = f"{number[1]}GiB or {number[1]}GB" if number and float(number[1]) else "80GiB or 80GB"
        raise ConfigError(f"{option} {text} is not a size: write a number and its unit, such as {hint}")
    return round(float(found[1]) * _SIZES[unit])


def format_size(num_bytes: float) -> str:
    """Format a size with a binary unit."""
    unit, size = _unit_for(num_bytes)
    return f"{num_bytes / size:.1f} {unit}"


def format_table(results: Sequence[CandidateResult]) -> str:
    """Return a table with a row for each estimate, in one unit; empty if there is none."""
    found = [one for one in results if one.estimate is not None]
    if not found:
        return ""
    unit, size = _unit_for(max(_figures(one)[5] for one in found))
    has_limit = found[0].estimate is not None and found[0].estimate.device_memory is not None
    rows = [[*_HEADINGS, *(["fits"] if has_limit else []), f"(all in {unit})"]]
    best = least_communication(results) if has_limit else least_memory(results)
    for one in found:
        figures = [f"{figure / size:.2f}" for figure in _figures(one)]
        name = one.candidate.name + (_BEST_MARK if one is best else "")
        rows.append([*figures, *([_fits(one)] if has_limit else []), name])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths) for row in rows)


def format_notes(results: Sequence[CandidateResult], notes: Sequence[str] = ()) -> str:
    """Return the notes and the unusable candidates, grouped by reason; empty if there are none."""
    lines = list(notes)
    names_by_reason: dict[str, list[str]] = {}
    for one in results:
        if one.estimate is None:
            kind = "failed" if one.is_internal_error else "not possible"
            names_by_reason.setdefault(f"{kind}: {one.reason}", []).append(f"    {one.candidate.name}")
    for reason, names in names_by_reason.items():
        lines += [reason, *names]
    return "\n".join(lines)


def format_recommendation(results: Sequence[CandidateResult], device_memory: int | None) -> str:
    """Return the recommended candidate, or how to reduce memory if none fits."""
    least = least_memory(results)
    if least is None or least.estimate is None:
        return "no setting can train this model"
    if device_memory is None:
        return (
            f"least memory: {least.candidate.name}, {format_size(least.estimate.total)}\n"
            "give --device-memory, such as 80GiB, to find what fits"
        )
    best = least_communication(results)
    if best is None or best.estimate is None:
        excess = least.estimate.total - device_memory
        return (
            f"no setting fits in {format_size(device_memory)}: {least.candidate.name} needs the least,"
            f" {format_size(least.estimate.total)}, which is {format_size(excess)} too much: {_how_to_reduce(least)}"
        )
    return (
        f"cheapest that fits, by bytes sent: {best.candidate.name}, {format_size(best.estimate.total)} of"
        f" {format_size(device_memory)}, {format_size(best.estimate.sent)} sent by a rank in a step{_for_batch(best)}"
    )


def to_json(results: Sequence[CandidateResult]) -> list[dict[str, Any]]:
    """Return all results as JSON-serializable data, in bytes."""
    return [
        {
            "plugin": one.candidate.plugin,
            "settings": {key: _plain(value) for key, value in one.candidate.settings.items()},
            "mixed_precision": one.candidate.mixed_precision,
            "peak": None if one.estimate is None else {**asdict(one.estimate.peak), "total": one.estimate.total},
            "memory": None if one.estimate is None else asdict(one.estimate.memory),
            "dp_size": one.dp_size if one.estimate is not None else None,
            "fits": None if one.estimate is None else one.estimate.fits,
            "reason": one.reason or None,
            "seconds": round(one.seconds, 3),
        }
        for one in results
    ]


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else format_setting(value)


def _figures(result: CandidateResult) -> list[int]:
    if result.estimate is None:
        return []
    estimate = result.estimate
    parts = [getattr(estimate.peak, name) for name in _PARTS]
    return [*parts, estimate.total, estimate.memory.offloaded, estimate.sent]


def _fits(result: CandidateResult) -> str:
    return "yes" if result.estimate is not None and result.estimate.fits else "no"


def _for_batch(result: CandidateResult) -> str:
    # Bytes per step are comparable only with the number of batches per step.
    batches = "batch" if result.dp_size == 1 else "batches"
    return f", which trains with {result.dp_size} {batches}"


def _how_to_reduce(result: CandidateResult) -> str:
    estimate = result.estimate
    if estimate is not None and estimate.peak.activations > estimate.total - estimate.peak.activations:
        return "most of it is activations: give a smaller --batch or --seq"
    return "most of it is the model: give more ranks (--nproc), or --dtype bf16 to keep the weights in bf16"


def _unit_for(most: float) -> tuple[str, float]:
    return next(((unit, float(size)) for unit, size in _UNITS if most >= size), _UNITS[-1])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    *figures, name = row
    return "  ".join([*(one.rjust(width) for one, width in zip(figures, widths, strict=False)), name])
