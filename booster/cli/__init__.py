"""The command line: `booster run` starts ranks, `booster check` and `booster ckpt` look at what is on the disk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from booster.errors import BoosterError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0 if all went well, 2 for arguments that can't work.

    Args:
        argv: The arguments without the program's name; None for those of this process.
    """
    # Here, so that none costs a user of `import booster` anything.
    from booster.cli import benchmark, check, checkpoint, estimate, plot, run

    parser = argparse.ArgumentParser(prog="booster", description="Train one loop under any parallel strategy.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run.add_parser(commands)
    check.add_parser(commands)
    checkpoint.add_parser(commands)
    benchmark.add_parser(commands)
    estimate.add_parser(commands)
    plot.add_parser(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # said by the command itself, whose usage it is
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(arguments.handle(arguments))
    except BoosterError as error:
        print(f"booster {arguments.command}: {error}", file=sys.stderr)
        return 2
