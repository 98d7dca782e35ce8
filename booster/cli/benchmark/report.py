"""Results of all configurations, with their losses compared to those of one process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from booster.cli.arguments import count_text
from booster.errors import ConfigError

from .config import INNER_FACTOR, SERIAL, BenchmarkSettings, Configuration, Skipped
from .measure import Metrics
from .workers import ConfigurationError, WorkerPool

# Relative tolerance of fp32 losses, as the order of summation differs between configurations. A wrong gradient exceeds
# it by far: losses of the first steps are of the order of 1, and each step changes them by about 1e-3.
_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """Result of one configuration; `metrics` are None if the measurement failed.

    `loss_difference` is the largest relative one from the losses of one process, None if they were not compared.
    `error` is that of the measurement or of the losses.
    """

    configuration: Configuration
    metrics: Metrics | None = None
    loss_difference: float | None = None
    error: str | None = None


def measure_all(
    configurations: list[Configuration], settings: BenchmarkSettings, on_start: Callable[[str], None]
) -> list[BenchmarkResult]:
    """Measure a single process and then each configuration, whose names are reported as they start."""
    results: list[BenchmarkResult] = []
    expected: list[float] | None = None
    with closing(WorkerPool(settings)) as pool:
        for configuration in [Configuration(SERIAL), *configurations]:
            on_start(configuration.name)
            try:
                metrics = pool.measure(configuration)
            except ConfigurationError as error:
                results.append(BenchmarkResult(configuration=configuration, error=str(error)))
                continue
            if configuration.mode == SERIAL:
                expected = metrics.losses
            results.append(_compare_losses(configuration, metrics, expected))
    return results


def _compare_losses(configuration: Configuration, metrics: Metrics, expected: list[float] | None) -> BenchmarkResult:
    if expected is None:
        alone = "its losses could not be compared, as the single process failed"
        return BenchmarkResult(configuration=configuration, metrics=metrics, error=alone)
    # Comparisons with nan are False: this key makes it the maximum, and `not <=` below an error.
    differences = [
        abs(loss - reference) / abs(reference) for loss, reference in zip(metrics.losses, expected, strict=True)
    ]
    difference = max(differences, key=lambda one: (one != one, one))
    error: str | None = None
    if not difference <= _TOLERANCE:
        error = f"its losses are {metrics.losses}, but one process has {expected}"
    return BenchmarkResult(configuration=configuration, metrics=metrics, loss_difference=difference, error=error)


_HEADINGS = ("configuration", "forward", "backward", "step", "total", "memory", "sent", "received", "loss")
_SECONDS = ("forward_seconds", "backward_seconds", "step_seconds", "whole_seconds")
_BYTES = ("peak_bytes", "sent_bytes", "received_bytes")
_TIME_UNITS = (("ms", 1e-3),)
_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def describe(settings: BenchmarkSettings, device: str) -> str:
    """Return a one-line description of the benchmark."""
    inner = INNER_FACTOR * settings.hidden
    return (
        f"MLP of {count_text(settings.layers, 'layer')} {settings.hidden} -> {inner} -> {settings.hidden}, batch"
        f" {settings.batch} x {count_text(settings.sequence, 'token')}, fp32, AdamW, on {device};"
        f" {count_text(settings.num_ranks, 'rank')}, median of {count_text(settings.profile_steps, 'step')}, largest of"
        " the ranks"
    )


def format_table(results: Sequence[BenchmarkResult]) -> str:
    """Return a table with one row per result."""
    columns: list[list[str]] = [["", *(result.configuration.name for result in results)]]
    columns += [_column(results, name, _TIME_UNITS) for name in _SECONDS]
    columns += [_column(results, name, _BYTE_UNITS) for name in _BYTES]
    columns += [["", *(_loss_status(result) for result in results)]]
    titled = [[title, *column] for title, column in zip(_HEADINGS, columns, strict=True)]
    widths = [max(len(text) for text in column) for column in titled]
    lines = []
    for row in zip(*titled, strict=True):
        figures = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *figures]).rstrip())
    return "\n".join(lines)


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
                "loss_difference": difference if difference is not None and isfinite(difference) else None,
                "error": result.error,
            }
            for result, difference in ((one, one.loss_difference) for one in results)
        ],
        "left_out": [{"name": one.name, "reason": one.reason} for one in skipped],
    }


def _column(results: Sequence[BenchmarkResult], name: str, units: Sequence[tuple[str, float]]) -> list[str]:
    """Return the unit, the largest in which the maximum is at least 1, and the figures in that unit."""
    figures = [None if result.metrics is None else getattr(result.metrics, name) for result in results]
    most = max((figure for figure in figures if figure is not None), default=0)
    unit, size = next((one for one in units if most >= one[1]), units[-1])
    return [unit, *("" if figure is None else f"{figure / size:.2f}" for figure in figures)]


def _loss_status(result: BenchmarkResult) -> str:
    if result.metrics is None:
        return "failed"
    if result.error is None:
        return "equal"
    return "not compared" if result.loss_difference is None else "WRONG"


_MEBI = 2**20


def check_can_draw(path: Path) -> None:
    """Check that `draw` can write this file.

    Raises:
        ConfigError: matplotlib is not installed or does not support the file format.
    """
    try:
        backend = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError:
        raise ConfigError(
            f"--plot {path} needs matplotlib, which is not installed: pip install torch-booster[plot], or omit --plot"
        ) from None
    formats = sorted(backend.FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(
            f"--plot {path} has no suffix of an image format: use one of {', '.join(formats)}, such as"
            f" {path.with_suffix('.png')}"
        )


def draw(path: Path, title: str, results: Sequence[BenchmarkResult]) -> None:
    """Draw bar charts of time, memory and communication, with one bar per configuration, into an image file."""
    # Not by pyplot, which selects a display backend and keeps the figure alive.
    figure: Any = importlib.import_module("matplotlib.figure").Figure
    names = [result.configuration.name for result in results if result.metrics is not None]
    metrics = [result.metrics for result in results if result.metrics is not None]
    picture = figure(figsize=(14, 1.8 + 0.35 * len(names)), layout="constrained")
    picture.suptitle(title, fontsize=9)
    times, memory, communication = picture.subplots(1, 3, sharey=True)
    ends = [0.0] * len(names)
    for label in ("forward", "backward", "step"):
        lengths = [1000 * float(getattr(one, f"{label}_seconds")) for one in metrics]
        times.barh(names, lengths, left=ends, label=label)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    times.invert_yaxis()  # top to bottom as in the table
    times.set_title("time of a step, ms")
    times.legend(fontsize=8)
    memory.barh(names, [one.peak_bytes / _MEBI for one in metrics], color="tab:purple")
    memory.set_title("memory, MiB")
    communication.barh(names, [one.received_bytes / _MEBI for one in metrics], color="tab:gray")
    communication.set_title("received in a step, MiB")
    picture.savefig(path)
