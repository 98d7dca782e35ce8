"""`booster ckpt`: inspect, verify, convert and compare checkpoints, in one process and without a model."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from booster.errors import CheckpointError

from .arguments import add_command

_PATHS = """\
A path is a directory written by save_model, save_optimizer or booster.save, a root of step-... directories (the latest
complete step is used), a Hugging Face directory, an index file, or a single .safetensors, .bin or .pt file. Sources are
never changed, and their checksums are verified before anything is written from them. Writes are atomic. No command
executes a pickle.

exit codes:
  0  success; for diff: equal
  1  verify found damage; diff found differences
  2  failure: see the error message

examples:
  booster ckpt inspect run/step-00001200
  booster ckpt verify run
  booster ckpt convert run for-inference --dtype bf16 --no-optimizer --size-per-shard 5000
  booster ckpt convert model model-bin --format bin
  booster ckpt consolidate run model.safetensors
  booster ckpt diff run-a run-b --tolerance 1e-6
  booster ckpt export-optimizer run optimizer.pt
"""
_DTYPES = ("fp32", "bf16", "fp16")
_PIPE_CLOSED = 141  # as in a shell: 128 + SIGPIPE


def add_parser(commands: Any) -> None:
    """Add the parser of `booster ckpt` and its subcommands to argparse's subparsers."""
    text = "inspect, verify, convert and compare checkpoints"
    parser = add_command(commands, "ckpt", run, help=text, description=f"{text.capitalize()}.", epilog=_PATHS)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_inspect_and_verify(actions)
    _add_convert_and_consolidate(actions)
    _add_diff(actions)
    _add_export(actions)


def run(arguments: argparse.Namespace) -> int:
    """Run a subcommand and return its exit code.

    Raises:
        BoosterError: The subcommand failed; nothing was written.
    """
    from .ckpt_actions import ACTIONS  # here: the other commands start without it

    try:
        code = ACTIONS[arguments.action](arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, closed the pipe; flushing at interpreter exit would print an error.
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())
        return _PIPE_CLOSED
    except OSError as error:
        raise CheckpointError(f"{error}. Check the path, its permissions and the free space") from error
    return code


def _size(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # with a unit


def _add_action(actions: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    return add_command(actions, name, run, help=text, description=description, epilog=f"example:\n  {example}")


def _add_inspect_and_verify(actions: Any) -> None:
    text = "list the contents of a checkpoint, without reading the tensors"
    parser = _add_action(actions, "inspect", text, "booster ckpt inspect run --json")
    parser.add_argument("path", metavar="PATH", help="the checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")

    text = "check every file against the sizes and checksums recorded at the save"
    parser = _add_action(actions, "verify", text, "booster ckpt verify run/step-00001200")
    parser.add_argument("path", metavar="PATH", help="the checkpoint")


def _add_convert_and_consolidate(actions: Any) -> None:
    text = "write a checkpoint to another directory in another file format or dtype"
    example = "booster ckpt convert run for-inference --dtype bf16 --no-optimizer"
    parser = _add_action(actions, "convert", text, example)
    parser.add_argument("source", metavar="SRC", help="the checkpoint")
    parser.add_argument("target", metavar="DST", help="a directory that does not exist yet, or is empty")
    parser.add_argument("--format", choices=("safetensors", "bin"), help="format of the files (as in SRC)")
    parser.add_argument(
        "--size-per-shard", type=_size, default=1024, metavar="MB", help="largest file in MB, or as 5GB (1024)"
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="dtype of floats (as in SRC); float8, integers, and an optimizer's fp32 masters and counters are kept",
    )
    parser.add_argument("--no-optimizer", action="store_true", help="convert the model only, without training state")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint in DST")

    text = "write the model, or the optimizer, into one file"
    parser = _add_action(actions, "consolidate", text, "booster ckpt consolidate run model.safetensors")
    parser.add_argument("source", metavar="SRC", help="the checkpoint")
    parser.add_argument("target", metavar="FILE", help="the new file: .safetensors, .bin, .pt or .pth")
    parser.add_argument("--optimizer", action="store_true", help="the optimizer instead of the model")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")


def _add_diff(actions: Any) -> None:
    text = "compare two checkpoints: names, shapes, dtypes, elements, and the optimizer's groups"
    parser = _add_action(actions, "diff", text, "booster ckpt diff run-a run-b --tolerance 1e-6")
    parser.add_argument("left", metavar="A", help="a checkpoint")
    parser.add_argument(
        "right", metavar="B", help="another; if one is a single file, only its kind (model, optimizer) is compared"
    )
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="absolute tolerance for elements (0)")


def _add_export(actions: Any) -> None:
    text = "write the optimizer as a plain torch state_dict"
    parser = _add_action(actions, "export-optimizer", text, "booster ckpt export-optimizer run optimizer.pt")
    parser.epilog = f"""{parser.epilog}

in Python:
  optimizer = torch.optim.AdamW(model.parameters())  # the same groups, parameters in the printed order
  optimizer.load_state_dict(torch.load("optimizer.pt", weights_only=True))

Besides "state" and "param_groups" the file holds "parameter_names", the name of every index, and with --master-weights
"master_weights", the fp32 master weight of every index. torch ignores both."""
    parser.add_argument("source", metavar="SRC", help="the checkpoint")
    parser.add_argument("target", metavar="FILE", help="the new file: .pt, .pth or .bin")
    parser.add_argument("--master-weights", action="store_true", help="add the fp32 master weights")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
