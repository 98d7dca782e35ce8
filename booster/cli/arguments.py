"""What commands share: parsers of arguments, those that describe a training to estimate, and the text of sizes."""

from __future__ import annotations

import argparse
import ast
import difflib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster.errors import ConfigError

if TYPE_CHECKING:
    from booster.estimate.model_sources import ModelSource

MODEL_FORMS = """\
models:
  a name                  llama-7b, llama-3-70b, mixtral-8x7b, gpt2-xl, bert-large ...: an unknown one lists all
  a path                  config.json of a transformers model, or its directory; nothing is downloaded
  script.py:function      a function that returns a model, (model, batch) or (model, batch, criterion); it is called
                          under torch.device("meta"), so that no memory is allocated
"""


def add_command(
    commands: Any, name: str, handle: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    """Add a command, and return its parser. Of an epilog of several lines the line breaks are kept."""
    keeps_lines = "\n" in texts.get("epilog", "")
    formatter = argparse.RawDescriptionHelpFormatter if keeps_lines else argparse.HelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(name, formatter_class=formatter, **texts)
    parser.set_defaults(handle=handle)
    return parser


def add_option(parser: Any, *names: str, **settings: Any) -> None:
    """Add an option, whose names may be written with underscores as well."""
    spellings = (one for name in names for one in (name, name[:2] + name[2:].replace("-", "_")))
    parser.add_argument(*dict.fromkeys(spellings), **settings)


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the training, and the device's memory."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="see below")
    add_option(parser, "-g", "--nproc", "--num-ranks", type=int, default=8, metavar="N", help="ranks of the job (8)")
    parser.add_argument("--plugin", default="all", metavar="A,B", help="names of plugins; none: one device (all)")
    parser.add_argument(
        "--settings", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the plugin, if one is named"
    )
    add_option(
        parser,
        "--mixed-precision",
        metavar="NAME",
        help="mixed precision, or precision of the plugins that have their own (fp32 and bf16)",
    )
    parser.add_argument(
        "--dtype", default="fp32", choices=["fp32", "bf16", "fp16"], help="dtype of the initialized weights (fp32)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="batch size per rank (1)")
    add_option(parser, "--seq", "--sequence-length", type=int, metavar="N", help="sequence length (2048)")
    add_option(
        parser,
        "--checkpoint-activations",
        metavar="POLICY",
        help="activation checkpointing: layers, selective, a budget per rank such as 8GiB, or auto: as little as fits",
    )
    add_option(
        parser,
        "--gradient-checkpointing",
        dest="checkpoint_activations",
        action="store_const",
        const="layers",
        help="--checkpoint-activations layers",
    )
    text = "offload the inputs of recomputed layers to the host"
    add_option(parser, "--offload-activations", action="store_true", help=text)
    parser.add_argument("--optimizer", default="AdamW", metavar="NAME", help="class of torch.optim or optim (AdamW)")
    text = "arguments of the optimizer, such as momentum=0.9"
    add_option(parser, "--optimizer-settings", nargs="+", default=[], metavar="KEY=VALUE", help=text)
    add_option(parser, "--device-memory", metavar="SIZE", help="memory per rank, such as 80GiB, to find what fits")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="machine profile for step times (this machine's, measured once)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, sizes in bytes")


def check_training_arguments(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` unless numbers are positive, and other arguments fit to --checkpoint-activations auto."""
    for option, number in (("--nproc", arguments.nproc), ("--batch", arguments.batch), ("--seq", arguments.seq)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} {number} is not positive: give a number from 1")
    if arguments.checkpoint_activations != "auto":
        return
    if arguments.device_memory is None:
        raise ConfigError(
            "--checkpoint-activations auto recomputes as little as fits the device, whose memory was not given: add"
            " --device-memory, such as --device-memory 80GiB"
        )
    for option in ("offload_activations", "checkpoint"):
        if getattr(arguments, option, False):
            raise ConfigError(
                f"--checkpoint-activations auto with --{option.replace('_', '-')} is not possible: leave that out, or"
                " write --checkpoint-activations layers"
            )


def load_training_model(arguments: argparse.Namespace) -> ModelSource:
    """Return the model of --model on the meta device, with its batch and activation checkpointing."""
    import torch

    from booster.activation_checkpointing import checkpoint_activations
    from booster.estimate.candidates import bytes_from_text
    from booster.estimate.model_sources import load_model

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
        checkpoint_activations(source.model, name, budget_bytes=budget, offload="cpu" if offload else None)
        what = {
            "layers": "layers are recomputed",
            "selective": "cheap operations of layers are recomputed",
            "budget": f"layers are recomputed as far as their activations exceed {budget} bytes",
        }[name]
        source.notes.append(f"{what} in backward{', with their inputs offloaded' if offload else ''}")
    elif offload:
        raise ConfigError(
            "--offload-activations is for the inputs of recomputed layers: add --checkpoint-activations layers"
        )
    return source


def parse_settings(given: list[str], option: str) -> dict[str, Any]:
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


def find_optimizer(name: str, given: list[str]) -> Any:
    """Return a function that makes the optimizer of --optimizer from a list of parameters."""
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
    settings = parse_settings(given, "--optimizer-settings")

    def make(parameters: Any) -> Any:
        try:
            return cls(parameters, **settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"--optimizer {cls.__name__} can't be created with {' '.join(given) or 'its defaults'} ({error}):"
                " correct --optimizer-settings"
            ) from error

    return make


def title_of(arguments: argparse.Namespace, source: ModelSource) -> str:
    """Return a line about the model, its batch, the optimizer and the number of ranks."""
    numel = sum(parameter.numel() for parameter in source.model.parameters())
    count = next(
        (f"{numel / size:.2f} {word}" for size, word in ((10**9, "billion"), (10**6, "million")) if numel >= size),
        str(numel),
    )
    batch = f"a batch of {source.batch_text} per rank" if source.batch_text else "the batch of the script"
    ranks = count_text(arguments.nproc, "rank")
    return f"{source.name}: {count} parameters in {arguments.dtype}, {batch}, {arguments.optimizer}, {ranks}"


_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(num_bytes: float) -> str:
    """Format a size with a decimal unit."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes /= 1000
        unit += 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.2f} {_UNITS[unit]}"


def count_text(count: int, noun: str) -> str:
    """Format a count and its noun, in the plural unless it is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
