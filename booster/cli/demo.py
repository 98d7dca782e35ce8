"""`booster demo`: train a small model on this machine, stop, resume, and draw the loss in the terminal."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from booster.errors import ConfigError

from .arguments import add_command

SCRIPT = Path(__file__).with_name("demo_train.py")
_WIDTH, _HEIGHT = 64, 12  # of the chart, in characters


def add_parser(commands: Any) -> None:
    """Add the parser of `booster demo` to argparse's subparsers."""
    parser = add_command(
        commands,
        "demo",
        demo,
        help="train a small model on this machine and draw its loss",
        description="Train a small GPT on the source of Python's standard library: half way, and on from the"
        " checkpoint. It takes about a minute on two cores. Nothing is left behind.",
        epilog="example: booster demo --plugin gemini",
    )
    parser.add_argument("--plugin", default="torch_ddp", help="name of a plugin; default: torch_ddp")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="number of processes; default: 2")
    parser.add_argument("--steps", type=int, default=120, help="default: 120")


def demo(arguments: argparse.Namespace) -> int:
    """Train, resume and draw; return the exit code of the first run that fails, else 0."""
    # Imported here, so that the other commands start without it.
    from booster.monitor.loggers import read_run

    if arguments.nproc_per_node < 1 or arguments.steps < 2:
        raise ConfigError(
            f"--nproc-per-node {arguments.nproc_per_node} --steps {arguments.steps}: the demo trains on 1 or more"
            " processes, and stops once between its steps: give at least 1 and 2"
        )
    with tempfile.TemporaryDirectory(prefix="booster-demo-") as folder:
        for last in (arguments.steps // 2, arguments.steps):
            launch = [sys.executable, "-m", "booster", "run", "--nproc-per-node", str(arguments.nproc_per_node)]
            options = ["--plugin", arguments.plugin, "--steps", str(arguments.steps), "--stop-after", str(last)]
            code = subprocess.run([*launch, str(SCRIPT), "--output", folder, *options], check=False).returncode
            if code != 0:
                return code
        records = read_run(Path(folder) / "log.jsonl").records
    print("\n".join(chart([record["loss"] for record in records.values()])))
    return 0


def chart(values: Sequence[float], width: int = _WIDTH, height: int = _HEIGHT) -> list[str]:
    """Return the lines of a chart of finite numbers over their index, a column each, or that of the mean of several."""
    width = min(width, len(values))
    edges = [column * len(values) // width for column in range(width + 1)]
    columns = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(columns), max(columns)
    rows = [round((high - value) / (high - low or 1.0) * (height - 1)) for value in columns]
    lines = []
    for row in range(height):
        label = f"{high - (high - low) * row / (height - 1):7.3f} |"
        lines.append(label + "".join("*" if found == row else " " for found in rows).rstrip())
    return [*lines, " " * 8 + "+" + "-" * width, f"{'':9}1{len(values):>{max(1, width - 1)}}  steps"]
