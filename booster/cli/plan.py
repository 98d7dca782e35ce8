"""`booster plan`: the plugin and settings that train a model fastest, on this machine or on one that it is not."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster.errors import ConfigError

from .arguments import (
    MODEL_FORMS,
    add_command,
    add_option,
    add_training_arguments,
    check_training_arguments,
    title_of,
)

if TYPE_CHECKING:
    from booster.estimate.machine_profile import MachineProfile

_MORE = f"""\
{MODEL_FORMS}
Every plugin with its settings is estimated as by `booster estimate`, and ranked by the predicted time per batch, or by
memory. --output writes the best one that fits to a file, which trains by
  Booster(plugin=AutoPlugin.from_plan("plan.json"))

machines:
  this one                what `booster profile-mesh` measured, or measures at first use
  --profile FILE          one that was measured elsewhere
  --device NAME           one by its data sheet: a100, h100, h200, b200, l40s, mi300x ...: an unknown one lists all
  --interconnect A,B      links within a host and between hosts: nvlink4,ib-ndr, or a bandwidth per rank in one
                          direction and a latency, such as 300GB/s:10us,400Gb/s:20us; an unknown one lists all
  --ranks-per-host N      ranks of a host

exit codes:
  0  there is a plan
  1  no setting fits or can be used, or a plugin failed: see the last lines
  2  the arguments are invalid: see the error message
  130  interrupted by Ctrl-C

examples:
  booster plan --model train.py:build_model --nproc 4 --output plan.json
  booster plan --model llama-3-70b --nproc 64 --device h100 --device-memory 80GiB --interconnect nvlink4,ib-ndr
"""


def add_parser(commands: Any) -> None:
    """Add the parser of `booster plan` to argparse's subparsers."""
    parser = add_command(
        commands,
        "plan",
        plan,
        help="find the plugin and settings that train a model fastest",
        description="Find the plugin and settings that train a model fastest, without allocating any of it.",
        epilog=_MORE,
    )
    add_training_arguments(parser)
    parser.add_argument("--device", metavar="NAME", help="device of another machine (this machine's)")
    parser.add_argument("--interconnect", metavar="A,B", help="links of another machine (the device's own, ib-ndr)")
    add_option(parser, "--ranks-per-host", type=int, metavar="N", help="ranks on a host of another machine (8)")
    parser.add_argument(
        "--objective", default="time", choices=["time", "memory"], help="what plans are ranked by (time)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="file of the plan")


def plan(arguments: argparse.Namespace) -> int:
    """Print the ranking, write the plan and return the exit code."""
    # Imported here, so that the other commands start without them.
    from booster.auto_parallel.search import refuse_small_batches, search
    from booster.estimate.candidates import to_json

    from .estimate_jobs import estimate_all, prepare

    _check(arguments)
    num_ranks = arguments.nproc
    candidates, recipe, source, device_memory = prepare(arguments)
    profile, note = _machine(arguments)
    result = search(
        recipe,
        candidates,
        num_ranks,
        objective=arguments.objective,
        device_memory=device_memory,
        profile=profile,
        needs_accelerator_to_offload=not arguments.settings,
        refusals=lambda one: "" if arguments.settings else refuse_small_batches(one, num_ranks, recipe),
        estimate_all=partial(estimate_all, arguments, device_memory, profile, recipe),
    )
    found = None if result.best is None else result.plan(recipe, num_ranks)
    if arguments.json:
        values = {
            "model": source.name,
            "objective": arguments.objective,
            "machine": result.machine,
            "candidates": to_json(result.results),
            "chosen": None if result.best is None else result.results.index(result.best),
            "notes": [*source.notes, note],
        }
        print(json.dumps(values, indent=2))
    else:
        print(f"{title_of(arguments, source)}\n\n{result.format([*source.notes, note])}")
    if found is not None and arguments.output is not None:
        found.save(arguments.output)
        print(f"\nwritten to {arguments.output}", file=sys.stderr if arguments.json else sys.stdout)
    return 0 if found is not None and not any(one.is_internal_error for one in result.results) else 1


def _check(arguments: argparse.Namespace) -> None:
    check_training_arguments(arguments)
    if arguments.ranks_per_host is not None and arguments.ranks_per_host < 1:
        raise ConfigError(f"--ranks-per-host {arguments.ranks_per_host} is not positive: give a number from 1")
    described = [one for one in ("device", "interconnect", "ranks_per_host") if getattr(arguments, one) is not None]
    if arguments.profile is not None and "device" in described:
        raise ConfigError("--profile is the speed of a machine, and so is --device: give one of them")
    if described == ["ranks_per_host"]:
        raise ConfigError("--ranks-per-host describes a machine without --device or --interconnect: add one of them")
    folder = None if arguments.output is None else arguments.output.absolute().parent
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--output {arguments.output}: there is no directory {folder}: make it, or give another path")


def _machine(arguments: argparse.Namespace) -> tuple[MachineProfile | None, str]:
    """Return the speed of the machine, or None, and a note about it."""
    from booster.estimate.data_sheets import profile_of_data_sheets

    from .estimate_jobs import find_machine

    measured, note = (None, "") if arguments.device is not None else find_machine(arguments)
    if arguments.device is None and (measured is None or arguments.interconnect is None):
        return measured, note
    profile = profile_of_data_sheets(
        arguments.device, arguments.interconnect, arguments.nproc, arguments.ranks_per_host or 8, measured
    )
    return profile, f"step times: predicted from {profile.machine}"
