"""`booster check`: check the installed versions, devices, kernels and communication."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from booster.errors import ConfigError

from .arguments import add_command

_LONGEST_SECONDS = 86400


def add_parser(commands: Any) -> None:
    """Add the parser of `booster check` to argparse's subparsers."""
    parser = add_command(
        commands,
        "check",
        check,
        help="check the installation",
        description="Check the installation. The exit code is 0 if no problem was found, 1 for a problem, 2 for "
        "invalid arguments.",
    )
    parser.add_argument(
        "-i",
        "--installation",
        action="store_true",
        help="check versions and their compatibility, devices, backends, compiler, kernels",
    )
    parser.add_argument("--comm", action="store_true", help="all-reduce a tensor between two processes")
    parser.add_argument("--comm-timeout", type=float, default=120, metavar="SECONDS", help="time limit of --comm (120)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def check(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code: 0, 1 for a problem, 2 if no check was selected."""
    if not arguments.installation and not arguments.comm:
        print(
            "booster check: nothing to check: give -i to check the installation, --comm to check communication",
            file=sys.stderr,
        )
        return 2
    if not 0 < arguments.comm_timeout <= _LONGEST_SECONDS:
        raise ConfigError(
            f"--comm-timeout={arguments.comm_timeout:g} is out of range: give seconds above 0, up to {_LONGEST_SECONDS}"
        )
    from . import check_machine as machine  # here: other commands do not need torch

    sections: list[machine.Section] = []
    if arguments.installation:
        sections += [machine.versions(), machine.extras(), machine.torch_backends()]
        sections += [machine.devices(), machine.compiler(), machine.kernels()]
    if arguments.comm:
        try:
            sections.append(machine.communication(arguments.comm_timeout))
        except KeyboardInterrupt:
            print("booster check: terminated by SIGINT, with both processes", file=sys.stderr)
            return 128 + signal.SIGINT
    print(machine.as_json(sections) if arguments.json else machine.as_text(sections), flush=True)
    return 1 if machine.problems_of(sections) else 0
