"""`booster plot`: draws what `Monitor(log=...)` has logged."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster.errors import ConfigError

__all__ = ["add_parser", "plot"]


def add_parser(commands: Any) -> None:
    """Adds the command's parser to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plot",
        help="draw the logs of runs",
        description="Draw loss, throughput and memory over steps, of one or several logs that Monitor(log=...) wrote.",
        epilog="example: booster plot runs/*.jsonl -o loss.png",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a file of JSON lines; each is a line in the figure")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the picture, such as loss.png")
    parser.set_defaults(handle=plot)


def plot(arguments: argparse.Namespace) -> int:
    """Draws the runs and returns 0.

    Raises:
        ConfigError: A log that can't be read or holds no step, or a picture that can't be written.
    """
    # Here, as they import torch, which the other commands have no need of.
    from booster.monitor.plotting import draw_runs
    from booster.monitor.runs import read_run

    output = Path(arguments.output)
    for log in arguments.logs:
        if os.path.realpath(log) == os.path.realpath(output):
            raise ConfigError(f"-o {arguments.output} is one of the logs, and would be written over: give another name")
    runs = [read_run(log, name) for log, name in zip(arguments.logs, _names(arguments.logs), strict=True)]
    for log, run in zip(arguments.logs, runs, strict=True):
        if run.num_broken:
            lines = "1 line" if run.num_broken == 1 else f"{run.num_broken} lines"
            print(f"{log}: left out {lines} that are no records, such as a killed run leaves", file=sys.stderr)
    draw_runs(runs, output)
    print(f"{output}: {', '.join(f'{run.name} ({len(run.records)} steps)' for run in runs)}")
    return 0


def _names(logs: Sequence[str]) -> list[str]:
    """Returns a name for each log: its own, with as much of its directory as makes them differ."""
    parts = [Path(log).with_suffix("").parts for log in logs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return list(logs)
