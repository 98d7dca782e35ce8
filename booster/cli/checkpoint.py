"""`booster ckpt`: looks at checkpoints, verifies, converts and compares them, in one process and without a model."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from booster.errors import CheckpointError

__all__ = ["add_parser"]

_PATHS = """\
A path is a directory that save_model, save_optimizer or booster.save wrote, a root of step-... directories (its latest
whole step is taken), a folder of Hugging Face, an index file, or a single .safetensors, .bin or .pt file. Sources are
never changed, and their checksums are compared before anything is written from them. What is written appears whole or
not at all. No command runs a pickle.

exit codes:
  0  all is well; for diff: equal
  1  verify found damage; diff found differences
  2  it can't be done: one line says why

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
_PIPE_CLOSED = 141  # as a shell says of a process that SIGPIPE ended


def add_parser(commands: Any) -> None:
    """Adds the command and its sub-commands to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "ckpt",
        help="look at, verify, convert and compare checkpoints",
        description="Look at, verify, convert and compare checkpoints.",
        epilog=_PATHS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handle=run)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_inspect(actions)
    _add_verify(actions)
    _add_convert(actions)
    _add_consolidate(actions)
    _add_diff(actions)
    _add_export(actions)


def run(arguments: argparse.Namespace) -> int:
    """Carries out a sub-command and returns its exit code.

    Raises:
        BoosterError: It can't be done; nothing was written.
    """
    from booster.cli.checkpoint_actions import ACTIONS  # here, so that other commands don't pay for it

    try:
        code = ACTIONS[arguments.action](arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # What reads the output, such as head, has enough; the interpreter would complain when it flushes at exit.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return _PIPE_CLOSED
    except OSError as error:
        raise CheckpointError(f"{error}. Check the path, its permissions and the free space") from error
    return code


def _add_action(actions: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_inspect(actions: Any) -> None:
    text = "list what a checkpoint holds, without reading the tensors"
    parser = _add_action(actions, "inspect", text, "booster ckpt inspect run --json")
    parser.add_argument("path", metavar="PATH", help="the checkpoint")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def _add_verify(actions: Any) -> None:
    text = "check every file against the sizes and checksums that were recorded when it was saved"
    parser = _add_action(actions, "verify", text, "booster ckpt verify run/step-00001200")
    parser.add_argument("path", metavar="PATH", help="the checkpoint")


def _add_convert(actions: Any) -> None:
    text = "write a checkpoint into another directory in another form"
    example = "booster ckpt convert run for-inference --dtype bf16 --no-optimizer"
    parser = _add_action(actions, "convert", text, example)
    parser.add_argument("source", metavar="SRC", help="the checkpoint")
    parser.add_argument("target", metavar="DST", help="a directory that does not exist yet, or is empty")
    parser.add_argument("--format", choices=("safetensors", "bin"), help="format of the files (as in SRC)")
    parser.add_argument("--size-per-shard", type=int, default=1024, metavar="MB", help="largest file in MB (1024)")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="what floats become (as in SRC); float8, integers, and an optimizer's fp32 masters and counters stay",
    )
    parser.add_argument("--no-optimizer", action="store_true", help="keep the model alone, without what resuming needs")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint that is in DST")


def _add_consolidate(actions: Any) -> None:
    text = "write the model, or the optimizer, into one file"
    parser = _add_action(actions, "consolidate", text, "booster ckpt consolidate run model.safetensors")
    parser.add_argument("source", metavar="SRC", help="the checkpoint")
    parser.add_argument("target", metavar="FILE", help="the new file: .safetensors, .bin, .pt or .pth")
    parser.add_argument("--optimizer", action="store_true", help="the optimizer instead of the model")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")


def _add_diff(actions: Any) -> None:
    text = "compare two checkpoints: names, shapes, formats, elements, and the optimizer's groups"
    parser = _add_action(actions, "diff", text, "booster ckpt diff run-a run-b --tolerance 1e-6")
    parser.add_argument("left", metavar="A", help="a checkpoint")
    parser.add_argument(
        "right", metavar="B", help="another; where one of the two is a single file, its kind is compared"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="absolute difference of elements that is none (0)"
    )


def _add_export(actions: Any) -> None:
    text = "write the optimizer as a state_dict of plain torch"
    parser = _add_action(actions, "export-optimizer", text, "booster ckpt export-optimizer run optimizer.pt")
    parser.epilog = f"""{parser.epilog}

in Python:
  optimizer = torch.optim.AdamW(model.parameters())  # the same groups, parameters in the order that is printed
  optimizer.load_state_dict(torch.load("optimizer.pt", weights_only=True))

Beside "state" and "param_groups" the file holds "parameter_names", the name of every number, and with --master-weights
"master_weights", the fp32 master of every number. torch ignores both."""
    parser.add_argument("source", metavar="SRC", help="the checkpoint")
    parser.add_argument("target", metavar="FILE", help="the new file: .pt, .pth or .bin")
    parser.add_argument("--master-weights", action="store_true", help="add the fp32 master weights")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
