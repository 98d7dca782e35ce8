"""`booster check`: is what the project needs there, does it go together, and can processes communicate?"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from booster.cli.check_report import Section, as_json, as_text, problems_of
from booster.errors import ConfigError

__all__ = ["add_parser", "check"]

_LONGEST_SECONDS = 86400


def add_parser(commands: Any) -> None:
    """Adds the command's parser to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="look at the installation",
        description="Look at the installation. The exit code is 0 if all is well, 1 for a problem, 2 for arguments "
        "that can't work.",
    )
    parser.add_argument(
        "-i",
        "--installation",
        action="store_true",
        help="versions and whether they go together, devices, backends, compiler, kernels",
    )
    parser.add_argument("--comm", action="store_true", help="start two processes and let them sum a tensor")
    parser.add_argument(
        "--comm-timeout", type=float, default=120, metavar="SECONDS", help="the longest that --comm may take (120)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(handle=check)


def check(arguments: argparse.Namespace) -> int:
    """Prints the report and returns 0, 1 where something is wrong, or 2 if there is nothing to look at.

    Raises:
        ConfigError: The arguments can't work.
    """
    if not arguments.installation and not arguments.comm:
        print(
            "booster check: say what to look at: booster check -i looks at the installation, --comm at communication",
            file=sys.stderr,
        )
        return 2
    if not 0 < arguments.comm_timeout <= _LONGEST_SECONDS:
        raise ConfigError(
            f"--comm-timeout={arguments.comm_timeout:g} is no time for two processes to start and sum a tensor: give "
            f"seconds above 0, up to {_LONGEST_SECONDS}"
        )
    sections = _installation() if arguments.installation else []
    if arguments.comm:
        try:
            sections.append(_communication(arguments.comm_timeout))
        except KeyboardInterrupt:
            print("booster check: ended by SIGINT, and both processes with it", file=sys.stderr)
            return 128 + signal.SIGINT
    print(as_json(sections) if arguments.json else as_text(sections), flush=True)
    return 1 if problems_of(sections) else 0


def _installation() -> list[Section]:
    from booster.cli.check_machine import compiler, devices, kernels, torch_backends
    from booster.cli.check_versions import extras, versions

    return [versions(), extras(), torch_backends(), devices(), compiler(), kernels()]


def _communication(timeout_seconds: float) -> Section:
    from booster.cli.check_communication import communication

    return communication(timeout_seconds)
