"""`booster plot`: draw the logs of `Monitor(log=...)`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster.errors import ConfigError

from .arguments import add_command, count_text


def add_parser(commands: Any) -> None:
    """Add the parser of `booster plot` to argparse's subparsers."""
    parser = add_command(
        commands,
        "plot",
        plot,
        help="draw the logs of runs",
        description="Draw loss, throughput, memory and the load of experts over steps from logs of Monitor(log=...).",
        epilog="example: booster plot runs/*.jsonl -o loss.png",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="JSON lines file; each is one line in the figure")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="image file, such as loss.png")
    panels = ("loss", "throughput", "memory", "experts")  # those of `booster.monitor.loggers`
    parser.add_argument("--only", nargs="+", choices=panels, default=panels, help="panels to draw; default: all")


def plot(arguments: argparse.Namespace) -> int:
    """Draw the runs and return 0."""
    # Imported here, so that the other commands start without them.
    from booster.monitor.loggers import draw_runs, read_run

    output = Path(arguments.output)
    for log in arguments.logs:
        if os.path.realpath(log) == os.path.realpath(output):
            raise ConfigError(f"-o {arguments.output} is one of the logs and would overwrite it: give another name")
    runs = [read_run(log, name) for log, name in zip(arguments.logs, _names(arguments.logs), strict=True)]
    for log, run in zip(arguments.logs, runs, strict=True):
        if run.num_invalid_lines:
            lines = count_text(run.num_invalid_lines, "line")
            print(f"{log}: skipped {lines} without a valid record, as a killed run leaves", file=sys.stderr)
    draw_runs(runs, output, arguments.only)
    print(f"{output}: {', '.join(f'{run.name} ({len(run.records)} steps)' for run in runs)}")
    return 0


def _names(logs: Sequence[str]) -> list[str]:
    """Return the file name of each log, prefixed by as many directories as make them unique."""
    parts = [Path(log).with_suffix("").parts for log in logs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return list(logs)
