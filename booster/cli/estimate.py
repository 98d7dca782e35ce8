"""`booster estimate`: memory of a model on every rank under each plugin, and the settings that fit a device."""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster.errors import ConfigError

from .text import count_text

if TYPE_CHECKING:
    from booster.estimate.machine_profile import MachineProfile
    from booster.estimate.model_sources import ModelSource

_MORE = """\
models:
  a name                  llama-7b, llama-3-70b, mixtral-8x7b, gpt2-xl, bert-large ...: an unknown one lists all
  a path                  config.json of a transformers model, or its directory; nothing is downloaded
  script.py:function      a function that returns a model, (model, batch) or (model, batch, criterion); it is called
                          under torch.device("meta"), so that no memory is allocated

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
    parser: argparse.ArgumentParser = commands.add_parser(
        "estimate",
        help="estimate the memory of a model under each plugin",
        description="Estimate the memory for training a model on every rank, without allocating any of it.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help="see below")
    parser.add_argument(
        "-g", "--nproc", "--num-ranks", "--num_ranks", type=int, default=8, metavar="N", help="ranks of the job (8)"
    )
    parser.add_argument("--plugin", default="all", metavar="A,B", help="names of plugins; none: one device (all)")
    parser.add_argument(
        "--settings", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the plugin, if one is named"
    )
    parser.add_argument(
        "--mixed-precision",
        "--mixed_precision",
        metavar="NAME",
        help="mixed precision, or precision of the plugins that have their own (fp32 and bf16)",
    )
    parser.add_argument(
        "--dtype", default="fp32", choices=["fp32", "bf16", "fp16"], help="dtype of the initialized weights (fp32)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="batch size per rank (1)")
    parser.add_argument(
        "--seq", "--sequence-length", "--sequence_length", type=int, metavar="N", help="sequence length (2048)"
    )
    parser.add_argument(
        "--checkpoint-activations",
        "--checkpoint_activations",
        metavar="POLICY",
        help="activation checkpointing: layers, selective, a budget per rank such as 8GiB, or auto: as little as fits",
    )
    parser.add_argument(
        "--gradient-checkpointing",
        "--gradient_checkpointing",
        dest="checkpoint_activations",
        action="store_const",
        const="layers",
        help="--checkpoint-activations layers",
    )
    parser.add_argument(
        "--offload-activations",
        "--offload_activations",
        action="store_true",
        help="offload the inputs of recomputed layers to the host",
    )
    parser.add_argument("--optimizer", default="AdamW", metavar="NAME", help="class of torch.optim or optim (AdamW)")
    parser.add_argument(
        "--optimizer-settings",
        "--optimizer_settings",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="arguments of the optimizer, such as momentum=0.9",
    )
    parser.add_argument(
        "--device-memory", "--device_memory", metavar="SIZE", help="memory per rank, such as 80GiB, to find what fits"
    )
    parser.add_argument(
        "--checkpoint", action="store_true", help="add what a save takes; takes two to five times as long"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="machine profile for step times (this machine's, measured once)"
    )
    parser.add_argument(
        "--no-step-time", "--no_step_time", action="store_true", help="predict no times and measure nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, sizes in bytes")
    parser.set_defaults(handle=estimate)


def estimate(arguments: argparse.Namespace) -> int:
    """Print the table and return the exit code.

    Raises:
        ConfigError: The arguments are invalid.
    """
    # Imported here, as these import torch, which the other commands do not need.
    from booster.estimate.candidates import (
        bytes_from_text,
        compare,
        fastest,
        find_candidates,
        format_notes,
        format_recommendation,
        format_table,
        least_communication,
        least_memory,
    )
    from booster.estimate.estimate import TrainingRecipe

    for option, number in (("--nproc", arguments.nproc), ("--batch", arguments.batch), ("--seq", arguments.seq)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} {number} is not positive: give a number from 1")
    memory = arguments.device_memory
    device_memory = None if memory is None else bytes_from_text(memory, "--device-memory")
    plans_activations = arguments.checkpoint_activations == "auto"
    _check_plan(arguments)
    settings = _settings(arguments.settings, "--settings")
    candidates = find_candidates(arguments.plugin, arguments.nproc, settings, arguments.mixed_precision)
    optimizer = _optimizer(arguments.optimizer, arguments.optimizer_settings)
    source = _load_model(arguments)
    optimizer([one for one in source.model.parameters() if one.requires_grad])  # a mistake in it is one of all settings
    recipe = TrainingRecipe(model=source.model, batch=source.batch, optimizer=optimizer, criterion=source.criterion)
    profile, profile_note = _find_profile(arguments)
    source.notes.append(profile_note)
    numbers = itertools.count(1)

    def show(name: str) -> None:  # on stderr, so that stdout has the table alone
        print(f"[{next(numbers)}/{len(candidates)}] {name}", file=sys.stderr, flush=True)

    try:
        results = compare(
            recipe,
            candidates,
            arguments.nproc,
            device_memory=device_memory,
            checkpoint=arguments.checkpoint,
            profile=profile,
            plans_activations=plans_activations,
            on_start=show,
        )
    except KeyboardInterrupt:
        print("booster estimate: interrupted by Ctrl-C", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps(_as_json(arguments, source, results, device_memory), indent=2))
    else:
        table = format_table(results)
        notes = format_notes(results, source.notes)
        paragraphs = [_title(arguments, source), table, notes, format_recommendation(results, device_memory)]
        print("\n\n".join(one for one in paragraphs if one))
    has_answer = fastest(results) is not None or (
        least_memory(results) is not None if device_memory is None else least_communication(results) is not None
    )
    return 0 if has_answer and not any(one.is_internal_error for one in results) else 1


def _check_plan(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` for what --checkpoint-activations auto can't go with."""
    if arguments.checkpoint_activations != "auto":
        return
    if arguments.device_memory is None:
        raise ConfigError(
            "--checkpoint-activations auto recomputes as little as fits the device, whose memory was not given: add"
            " --device-memory, such as --device-memory 80GiB"
        )
    for option in ("offload_activations", "checkpoint"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--checkpoint-activations auto with --{option.replace('_', '-')} is not possible: leave that out, or"
                " write --checkpoint-activations layers"
            )


def _find_profile(arguments: argparse.Namespace) -> tuple[MachineProfile | None, str]:
    """Return the machine's profile for step times, or None, and a note about it."""
    from booster.estimate.machine_profile import load_profile

    from .profile_mesh import MeasurementError, profile_for

    if arguments.no_step_time:
        return None, "step times: left out by --no-step-time"
    try:
        profile = profile_for(arguments.nproc) if arguments.profile is None else load_profile(arguments.profile)
    except MeasurementError as error:
        return None, f"step times: unknown, as the machine could not be measured: {error}"
    return profile, f"step times: predicted from {profile.machine} with {profile.num_ranks} rank(s) at work"


def _load_model(arguments: argparse.Namespace) -> ModelSource:
    import torch

    from booster.estimate.candidates import bytes_from_text
    from booster.estimate.model_sources import enable_activation_checkpointing, load_model

    # The reason why a model can't be run is listed; torch would log a stack as well.
    if "TORCH_LOGS" not in os.environ:
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[arguments.dtype]
    source = load_model(arguments.model, batch=arguments.batch, sequence=arguments.seq, dtype=dtype)
    policy, offload = arguments.checkpoint_activations, arguments.offload_activations
    if policy == "auto":
        source.notes.append("layers are recomputed in backward as far as it takes to fit; --json has the schedules")
    elif policy is not None:
        budget = None if policy in ("layers", "selective") else bytes_from_text(policy, "--checkpoint-activations")
        name = policy if budget is None else "budget"
        enable_activation_checkpointing(source, name, budget_bytes=budget, offload=offload)
    elif offload:
        raise ConfigError(
            "--offload-activations is for the inputs of recomputed layers: add --checkpoint-activations layers"
        )
    return source


def _settings(given: list[str], option: str) -> dict[str, Any]:
    """Parse key=value arguments, whose values are Python literals or plain words."""
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{option} {text} is not key=value: write, for example, stage=2 or precision=bf16")
        if key in found:
            raise ConfigError(f"{option} {text}: {key} was given twice: give it once")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a word
            found[key] = {"true": True, "false": False, "none": None}.get(value, value)
    return found


def _optimizer(name: str, given: list[str]) -> Any:
    import torch

    from booster import optim

    known = {
        one.lower(): getattr(module, one)
        for module in (torch.optim, optim)  # ours, if both have the name
        for one in (optim.__all__ if module is optim else dir(torch.optim))
        if isinstance(getattr(module, one), type) and issubclass(getattr(module, one), torch.optim.Optimizer)
    }
    known.pop("optimizer", None)
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" Did you mean {known[near[0]].__name__}?" if near else ""
        raise ConfigError(
            f"--optimizer {name} is not in torch.optim or optim.{hint} Known:"
            f" {', '.join(one.__name__ for one in known.values())}"
        )
    cls = known[name.lower()]
    settings = _settings(given, "--optimizer-settings")

    def make(parameters: Any) -> Any:
        try:
            return cls(parameters, **settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"--optimizer {cls.__name__} can't be created with {' '.join(given) or 'its defaults'} ({error}):"
                " correct --optimizer-settings"
            ) from error

    return make


def _title(arguments: argparse.Namespace, source: ModelSource) -> str:
    numel = sum(parameter.numel() for parameter in source.model.parameters())
    count = next(
        (f"{numel / size:.2f} {word}" for size, word in ((10**9, "billion"), (10**6, "million")) if numel >= size),
        str(numel),
    )
    batch = f"a batch of {source.batch_text} per rank" if source.batch_text else "the batch of the script"
    ranks = count_text(arguments.nproc, "rank")
    return f"{source.name}: {count} parameters in {arguments.dtype}, {batch}, {arguments.optimizer}, {ranks}"


def _as_json(
    arguments: argparse.Namespace, source: ModelSource, results: Any, device_memory: int | None
) -> dict[str, Any]:
    from booster.estimate.candidates import fastest, least_communication, to_json

    best, quickest = least_communication(results), fastest(results)
    return {
        "model": source.name,
        "num_parameters": sum(parameter.numel() for parameter in source.model.parameters()),
        "dtype": arguments.dtype,
        "batch": source.batch_text or None,
        "optimizer": arguments.optimizer,
        "num_ranks": arguments.nproc,
        "device_memory": device_memory,
        "candidates": to_json(results),
        "cheapest": None if best is None else results.index(best),
        "fastest": None if quickest is None else results.index(quickest),
        "notes": source.notes,
    }
