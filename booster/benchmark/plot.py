"""Bar charts of benchmark results."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster.benchmark.outcomes import BenchmarkResult
from booster.errors import ConfigError

__all__ = ["check_can_draw", "draw"]

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
    """Draw bar charts of time, memory and communication, with one bar per configuration.

    Args:
        path: Image file; its suffix determines the format.
        title: Title of the figure.
        results: Results; those without figures are skipped.
    """
    # Not by pyplot, which selects a display backend and keeps the figure alive.
    figure: Any = importlib.import_module("matplotlib.figure").Figure
    measured = [result for result in results if result.metrics is not None]
    names = [result.configuration.name for result in measured]
    picture = figure(figsize=(14, 1.8 + 0.35 * len(names)), layout="constrained")
    picture.suptitle(title, fontsize=9)
    times, memory, communication = picture.subplots(1, 3, sharey=True)
    _draw_times(times, names, measured)
    metrics = [result.metrics for result in measured if result.metrics is not None]
    memory.barh(names, [one.peak_bytes / _MEBI for one in metrics], color="tab:purple")
    memory.set_title("memory, MiB")
    communication.barh(names, [one.received_bytes / _MEBI for one in metrics], color="tab:gray")
    communication.set_title("received in a step, MiB")
    picture.savefig(path)


def _draw_times(axes: Any, names: Sequence[str], measured: Sequence[BenchmarkResult]) -> None:
    metrics = [result.metrics for result in measured if result.metrics is not None]
    ends = [0.0] * len(names)
    for label in ("forward", "backward", "step"):
        lengths = [1000 * float(getattr(one, f"{label}_seconds")) for one in metrics]
        axes.barh(names, lengths, left=ends, label=label)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.invert_yaxis()  # top to bottom as in the table
    axes.set_title("time of a step, ms")
    axes.legend(fontsize=8)
