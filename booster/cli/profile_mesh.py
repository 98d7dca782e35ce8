"""`booster profile-mesh`: measures operators and collectives of this machine, for predicted step times."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster.errors import ConfigError

from .arguments import add_command

if TYPE_CHECKING:
    from booster.estimate.machine_profile import MachineProfile

_SECONDS = 600.0  # of a measurement; on an idle machine it takes 15

_MORE = """\
All ranks work at the same time, as they do in training: products of matrices, attention, convolutions and memory per
dtype, the call of an operator, and each collective in groups of every size that divides the number of ranks, of
neighbors and of ranks on several hosts. The medians are kept in a file of the user's cache ($BOOSTER_PROFILE_CACHE is
another directory), which `booster estimate` and `booster plan` read. Measure while nothing else runs.

On several hosts, start the ranks as those of a training, and give the file to --profile of these commands:
  booster run --host a,b --nproc-per-node 8 -m booster.cli.profile_rank profile.json

exit codes:
  0  the machine was measured
  1  a rank failed: see the error message
  2  the arguments are invalid: see the error message
  130  interrupted by Ctrl-C
"""


def add_parser(commands: Any) -> None:
    """Add the parser of `booster profile-mesh` to argparse's subparsers."""
    parser = add_command(
        commands,
        "profile-mesh",
        run,
        help="measure this machine, for predicted step times",
        description="Measure the speed of this machine's operators and collectives.",
        epilog=_MORE,
    )
    parser.add_argument("-g", "--nproc", type=int, metavar="N", help="ranks (one per device; on the CPU per core)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file of the profile, in place of the cache's")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the speeds and return the exit code."""
    from booster.estimate.machine_profile import default_path

    num_ranks = _capacity() if arguments.nproc is None else arguments.nproc
    if num_ranks < 1:
        raise ConfigError(f"--nproc {num_ranks} is not positive: give a number from 1")
    path = default_path(num_ranks) if arguments.output is None else arguments.output.absolute()
    try:
        profile = measure(num_ranks, path)
    except MeasurementError as error:
        print(f"booster profile-mesh: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(profile), indent=2) if arguments.json else f"{profile.describe()}\n\nwritten to {path}")
    return 0


class MeasurementError(Exception):
    """A rank failed; the message has the end of its output."""


def measure(num_ranks: int, path: Path) -> MachineProfile:
    """Measure this machine with a number of ranks, write the profile to a file and return it.

    Raises:
        ConfigError: The file can't be written.
        MeasurementError: A rank failed, or took too long.
    """
    from booster.estimate.machine_profile import check_writable, load_profile

    check_writable(path)  # before minutes are spent
    command = [sys.executable, "-m", "booster", "run", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "booster.cli.profile_rank", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"measuring {num_ranks} rank(s) took more than {_SECONDS:.0f} s") from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise MeasurementError(
            f"measuring {num_ranks} rank(s) failed with exit code {done.returncode}: " + "\n".join(lines[-10:])
        )
    return load_profile(path)


def profile_for(num_ranks: int) -> MachineProfile:
    """Return this machine's profile for a number of ranks, measured now at first use.

    Of more ranks than the machine has devices, it is the nearest one, at first use that of all devices.

    Raises:
        MeasurementError: A rank of the measurement failed.
    """
    from booster.estimate.machine_profile import default_path, find_profile

    known, capacity = find_profile(num_ranks), _capacity()
    if known is not None and (known.num_ranks == num_ranks or num_ranks > capacity):
        return known
    measured = min(num_ranks, capacity)
    print(f"measuring this machine with {measured} rank(s), once", file=sys.stderr, flush=True)
    return measure(measured, default_path(measured))


def _capacity() -> int:
    """Return the number of ranks that have a device, or a core, of their own."""
    from booster.device import device_type, num_cores, num_devices

    return num_devices() if device_type() != "cpu" else num_cores()
