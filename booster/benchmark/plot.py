"""The outcomes as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster.benchmark.outcomes import Outcome
from booster.errors import ConfigError

__all__ = ["draw", "require_can_draw"]

_MEBI = 2**20


def require_can_draw(path: Path) -> None:
    """Checks that `draw` will be able to write this file.

    Raises:
        ConfigError: matplotlib is not installed, or knows no such format.
    """
    try:
        backend = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError:
        raise ConfigError(
            f"--plot {path} needs matplotlib, which is not installed: pip install torch-booster[plot], or leave --plot"
            " out"
        ) from None
    formats = sorted(backend.FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(
            f"--plot {path} has no ending that names a format of pictures: take one of {', '.join(formats)}, such as"
            f" {path.with_suffix('.png')}"
        )


def draw(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Draws times, memory and communication of what was measured, a bar for each configuration.

    Args:
        path: The file; its ending says the format.
        title: Above all.
        outcomes: Those without figures are left out, as the table names them.
    """
    # A figure of its own: pyplot would choose a screen and keep the figure.
    figure: Any = importlib.import_module("matplotlib.figure").Figure
    measured = [outcome for outcome in outcomes if outcome.figures is not None]
    names = [outcome.configuration.name for outcome in measured]
    picture = figure(figsize=(14, 1.8 + 0.35 * len(names)), layout="constrained")
    picture.suptitle(title, fontsize=9)
    times, memory, communication = picture.subplots(1, 3, sharey=True)
    _draw_times(times, names, measured)
    figures = [outcome.figures for outcome in measured if outcome.figures is not None]
    memory.barh(names, [one.peak_bytes / _MEBI for one in figures], color="tab:purple")
    memory.set_title("memory, MiB")
    communication.barh(names, [one.received_bytes / _MEBI for one in figures], color="tab:gray")
    communication.set_title("received in a step, MiB")
    picture.savefig(path)


def _draw_times(axes: Any, names: Sequence[str], measured: Sequence[Outcome]) -> None:
    figures = [outcome.figures for outcome in measured if outcome.figures is not None]
    ends = [0.0] * len(names)
    for label in ("forward", "backward", "step"):
        lengths = [1000 * float(getattr(one, f"{label}_seconds")) for one in figures]
        axes.barh(names, lengths, left=ends, label=label)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.invert_yaxis()  # the table's order, from above
    axes.set_title("time of a step, ms")
    axes.legend(fontsize=8)
