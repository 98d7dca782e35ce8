"""Command line: `booster run`, `check`, `ckpt`, `demo`, `benchmark`, `estimate`, `plan`, `profile-mesh`, `plot`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from booster.errors import BoosterError
from booster.version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; commands raise `BoosterError` for invalid arguments.

    It is 0 for success, 2 for invalid arguments, 130 for Ctrl-C.

    Args:
        argv: Arguments without the program name; optional, defaults to those of this process.
    """
    # Imported here to keep `import booster` cheap.
    from . import check, ckpt, demo, estimate, plan, plot, profile_mesh
    from .benchmark import benchmark
    from .run import run

    parser = argparse.ArgumentParser(prog="booster", description="Train one loop under any parallel strategy.")
    versions = f"torch-booster {__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run.add_parser(commands)
    check.add_parser(commands)
    demo.add_parser(commands)
    ckpt.add_parser(commands)
    benchmark.add_parser(commands)
    estimate.add_parser(commands)
    plan.add_parser(commands)
    profile_mesh.add_parser(commands)
    plot.add_parser(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # reported by the subcommand's parser, to print its usage
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(arguments.handle(arguments))
    except BoosterError as error:
        print(f"booster {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"booster {arguments.command}: interrupted by Ctrl-C", file=sys.stderr)
        return 130
