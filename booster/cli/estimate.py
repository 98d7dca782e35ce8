"""`booster estimate`: memory of a model on every rank under each plugin, and the settings that fit a device."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .arguments import (
    MODEL_FORMS,
    add_command,
    add_option,
    add_training_arguments,
    check_training_arguments,
    title_of,
)

_MORE = f"""\
{MODEL_FORMS}
All figures are peak memory of a step on the rank that needs the most; activations are measured on fake tensors.
"offloaded" is kept in host memory or in files, "sent" is what a rank sends in a step, "groups" is the number of its
process groups for the device: NCCL's buffers for each are not included. The batch is per rank; where
ranks share one, as with tensor parallelism, a step trains fewer batches. The fastest setting is the one that fits with
the least predicted time per batch, from what `booster profile-mesh` measured on this machine, or measures at first use;
without times it is the cheapest one, with the fewest bytes sent by all ranks per batch.
With --checkpoint, "save" is host memory that save_model and save_optimizer take beside it, "async save" that of both in
flight with use_async=True; what they take on the device is part of the peak. Ranks that hold the same share the work.

exit codes:
  0  a setting fits, or no --device-memory was given
  1  no setting fits or can be used, or a plugin failed: see the last lines
  2  the arguments are invalid: see the error message
  130  interrupted by Ctrl-C

examples:
  booster estimate --model llama-7b --nproc 8 --device-memory 80GiB
  booster estimate --model train.py:build_model --nproc 4 --plugin low_level_zero,torch_fsdp
  booster estimate --model checkpoints/llama/config.json --nproc 8 --plugin gemini --settings placement_policy=static
"""


def add_parser(commands: Any) -> None:
    """Add the parser of `booster estimate` to argparse's subparsers."""
    parser = add_command(
        commands,
        "estimate",
        estimate,
        help="estimate the memory of a model under each plugin",
        description="Estimate the memory for training a model on every rank, without allocating any of it.",
        epilog=_MORE,
    )
    add_training_arguments(parser)
    parser.add_argument(
        "--checkpoint", action="store_true", help="add what a save takes; takes two to five times as long"
    )
    add_option(parser, "--no-step-time", action="store_true", help="predict no times and measure nothing")


def estimate(arguments: argparse.Namespace) -> int:
    """Print the table and return the exit code."""
    # Imported here, so that the other commands start without them.
    from booster.estimate.candidates import (
        fastest,
        format_notes,
        format_recommendation,
        format_table,
        least_communication,
        least_memory,
        to_json,
    )

    from .estimate_jobs import estimate_all, find_machine, prepare

    check_training_arguments(arguments)
    candidates, recipe, source, device_memory = prepare(arguments)
    left_out = (None, "step times: left out by --no-step-time")
    profile, profile_note = left_out if arguments.no_step_time else find_machine(arguments)
    source.notes.append(profile_note)
    results = estimate_all(arguments, device_memory, profile, recipe, candidates)
    cheapest, quickest = least_communication(results), fastest(results)
    if arguments.json:
        values = {
            "model": source.name,
            "num_parameters": sum(parameter.numel() for parameter in source.model.parameters()),
            "dtype": arguments.dtype,
            "batch": source.batch_text or None,
            "optimizer": arguments.optimizer,
            "num_ranks": arguments.nproc,
            "device_memory": device_memory,
            "candidates": to_json(results),
            "cheapest": None if cheapest is None else results.index(cheapest),
            "fastest": None if quickest is None else results.index(quickest),
            "notes": source.notes,
        }
        print(json.dumps(values, indent=2))
    else:
        table = format_table(results)
        notes = format_notes(results, source.notes)
        paragraphs = [title_of(arguments, source), table, notes, format_recommendation(results, device_memory)]
        print("\n\n".join(one for one in paragraphs if one))
    answer = quickest or cheapest or (least_memory(results) if device_memory is None else None)
    return 0 if answer is not None and not any(one.is_internal_error for one in results) else 1
