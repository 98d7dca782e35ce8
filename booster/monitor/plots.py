"""Plots of runs: loss, throughput and memory over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster.errors import ConfigError

from .loggers import LoggedRun

_MANY_STEPS = 200  # above, markers would hide the line
_INCHES = (7.0, 3.0)  # width and height of a panel


def draw_runs(runs: Sequence[LoggedRun], path: Path) -> None:
    """Write a figure with panels for loss, throughput and memory, and one line per run.

    Args:
        runs: Runs, at least one.
        path: Path of the image; its suffix selects the format.

    Raises:
        ConfigError: matplotlib is not installed or does not support the suffix, or the path is not writable.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"plots need matplotlib, which is not installed ({error}): run `pip install torch-booster[plot]`"
        ) from error
    figure = Figure(figsize=(_INCHES[0], 3 * _INCHES[1]), layout="constrained")
    kinds = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"{str(path)!r} has no supported image suffix: choose one of {', '.join(sorted(kinds))}, such as"
            f" {path.with_suffix('.png').name}"
        )
    loss, throughput, memory = figure.subplots(3, sharex=True)
    for run in runs:
        _draw(loss, run, "loss")
        _draw(throughput, run, _throughput_name(run))
        _draw(memory, run, "memory", scale=2**-20)
    loss.set_ylabel("loss")
    units = sorted({_throughput_name(run).removesuffix("_per_second") for run in runs})
    throughput.set_ylabel(f"{' or '.join(units)} per second")
    throughput.set_ylim(bottom=0)
    memory.set_ylabel("peak memory (MiB, largest rank)")
    memory.set_ylim(bottom=0, top=memory.get_ylim()[1] * 1.05)
    memory.set_xlabel("step")
    loss.legend()
    for panel in (loss, throughput, memory):
        panel.grid(visible=True, alpha=0.3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} is not writable ({error}): pass the path of a writable file") from error


def _throughput_name(run: LoggedRun) -> str:
    has_tokens = any("tokens_per_second" in record for record in run.records.values())
    return "tokens_per_second" if has_tokens else "samples_per_second"


def _draw(panel: Any, run: LoggedRun, name: str, scale: float = 1.0) -> None:
    steps, numbers = run.series(name)
    marker = "" if len(steps) > _MANY_STEPS else "."
    panel.plot(steps, [number * scale for number in numbers], label=run.name, marker=marker)
