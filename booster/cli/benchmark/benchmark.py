"""`booster benchmark`: measure all parallel configurations of an MLP for a number of ranks on this machine."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from booster.cli.arguments import add_command, add_option
from booster.errors import ConfigError

_MORE = """\
modes:
  1d      tensor parallelism by columns and rows, with data parallelism over the other ranks: tp * dp ranks
  2d      tensor parallelism on a 2D mesh, SUMMA: q * q ranks
  2.5d    several 2D meshes with the same weights, Tesseract: depth * q * q ranks
  3d      tensor parallelism on a 3D mesh: q * q * q ranks
  dp      TorchDDPPlugin
  zero1   LowLevelZeroPlugin(stage=1)
  zero2   LowLevelZeroPlugin(stage=2)
  gemini  GeminiPlugin

The batch is the global batch, so that all rows do the same work; the first row is one process with all cores, or one
device. A layer expands the hidden size by a factor of four and projects it back. Memory is the peak of all tensors:
weights, gradients, optimizer states, activations and the rank's shard of the batch. Sent and received are bytes per
rank and step. In the same run the losses of the first steps are compared with those of one process. Configurations
that N ranks or the sizes do not allow are listed below the table.

exit codes:
  0  all configurations were measured, and their losses are right
  1  a configuration failed, or its losses are wrong: see the last lines
  2  the arguments are invalid: see the error message
  130  interrupted by Ctrl-C; all processes were terminated

examples:
  booster benchmark -g 4
  booster benchmark -g 8 -b 16 -s 128 -d 512 -l 4 -m 1d,2.5d,3d --plot grids.png
  booster benchmark -g 2 -m dp,zero1,zero2,gemini --json data-parallel.json
"""


def add_parser(commands: Any) -> None:
    """Add the parser of `booster benchmark` to argparse's subparsers."""
    parser = add_command(
        commands,
        "benchmark",
        run,
        help="measure parallel configurations of an MLP",
        description="Measure all parallel configurations of an MLP for a number of ranks on this machine.",
        epilog=_MORE,
    )

    def add_number(*names: str, default: int | None, help: str) -> None:
        add_option(parser, *names, type=int, default=default, metavar="N", help=help)

    add_number("-g", "--nproc", "--gpus", default=None, help="ranks (number of accelerators, else 4)")
    add_number("-b", "--batch-size", default=8, help="global batch size (8)")
    add_number("-s", "--sequence-length", "--seq-len", default=64, help="sequence length (64)")
    add_number("-d", "--hidden", "--dimension", default=256, help="hidden size (256)")
    add_number("-l", "--layers", default=2, help="MLP layers (2)")
    add_number("-w", "--warmup-steps", default=2, help="warmup steps (2)")
    add_number("-p", "--profile-steps", default=5, help="timed steps (5)")
    parser.add_argument("-m", "--modes", default="all", metavar="A,B", help="some of the modes below (all)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="time limit of a configuration (300)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table into a file such as out.png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON, in seconds and bytes")


def run(arguments: argparse.Namespace) -> int:
    """Run the measurements, print the table and return the exit code."""
    # Imported here, so that the other commands start without them.
    from .config import BenchmarkSettings, find_configurations, modes_from_text
    from .report import check_can_draw, draw

    settings = BenchmarkSettings(
        num_ranks=_num_ranks(arguments.nproc),
        batch=arguments.batch_size,
        sequence=arguments.sequence_length,
        hidden=arguments.hidden,
        layers=arguments.layers,
        warmup_steps=arguments.warmup_steps,
        profile_steps=arguments.profile_steps,
        modes=modes_from_text(arguments.modes),
        timeout_seconds=arguments.timeout,
    )
    configurations, skipped = find_configurations(settings)
    for option, path in (("--plot", arguments.plot), ("--json", arguments.json)):
        _check_output_path(option, path)
    if arguments.plot is not None:
        check_can_draw(arguments.plot)
    from booster.device import device_type

    from .report import describe, format_notes, format_table, measure_all, to_json

    title = describe(settings, device_type())
    print(title, flush=True)
    numbers = itertools.count(1)

    def show(name: str) -> None:  # on stderr, so that stdout has the table alone
        print(f"[{next(numbers)}/{1 + len(configurations)}] {name}", file=sys.stderr, flush=True)

    try:
        results = measure_all(configurations, settings, show)
    except KeyboardInterrupt:
        print("booster benchmark: interrupted by Ctrl-C; all processes were terminated", file=sys.stderr)
        return 130
    print(f"\n{format_table(results)}")
    notes = format_notes(results, skipped)
    if notes:
        print(f"\n{notes}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(settings, device_type(), results, skipped), indent=2) + "\n")
    if arguments.plot is not None:
        draw(arguments.plot, title, results)
    return int(any(result.error is not None for result in results))


def _num_ranks(given: int | None) -> int:
    from booster.device import device_type, num_devices

    has_accelerators = device_type() != "cpu"
    if given is None:
        return num_devices() if has_accelerators else 4
    if has_accelerators and given > num_devices():
        raise ConfigError(
            f"-g {given} is more than the {num_devices()} {device_type()} device(s) of this machine, and every rank"
            f" needs one: give at most {num_devices()}, or hide the accelerators to measure on the CPU"
        )
    return given


def _check_output_path(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory: give the name of a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{option} {path}: there is no directory {path.absolute().parent}: create it, or correct the path"
        )
