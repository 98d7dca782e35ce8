"""`booster run`: starts a script on several ranks of this machine, with torch's own elastic launcher below."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from booster.errors import ConfigError

__all__ = ["add_parser", "run"]

_WORKER = Path(__file__).with_name("worker.py")
_DEFAULT_PORT = 29500


def add_parser(commands: Any) -> None:
    """Adds the command's parser to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run", help="start a script on several ranks", description="Start a script on several ranks."
    )
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", default="1", metavar="N", help="ranks on this machine, or auto (1)"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="machines; run this on each of them (1)")
    parser.add_argument(
        "--node-rank", "--node_rank", type=int, default=0, metavar="N", help="number of this machine, from 0 (0)"
    )
    parser.add_argument("--master-addr", "--master_addr", metavar="HOST", help="address of machine 0")
    parser.add_argument("--master-port", "--master_port", type=int, metavar="PORT", help="port there (a free one)")
    parser.add_argument(
        "--max-restarts", "--max_restarts", type=int, default=0, metavar="N", help="starts anew after a failure (0)"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="script is the name of a module")
    parser.add_argument("script", help="path of a Python file")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    parser.set_defaults(handle=run)


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks, waits for them, and returns 0 or the exit code of the rank that failed first.

    A rank that was killed by a signal counts as 128 + the signal's number, as in a shell; so does the launcher itself.

    Raises:
        ConfigError: The arguments can't work; nothing was started.
    """
    num_ranks = _num_ranks(arguments.nproc_per_node)
    _check(arguments)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from booster.cli.failure import exit_code_of, report

    with tempfile.TemporaryDirectory(prefix="booster_run_") as log_dir, _environment(num_ranks):
        _silence_elastic_logs()
        try:
            elastic_launch(_launch_config(arguments, num_ranks, log_dir), sys.executable)(*_command(arguments))
        except ChildFailedError as error:
            print(report(error.failures, arguments.nnodes * num_ranks), file=sys.stderr, flush=True)
            return exit_code_of(error.failures)
        except SignalException as error:
            print(f"booster run: ended by {error.sigval.name}, and all ranks with it", file=sys.stderr)
            return 128 + int(error.sigval)
        except KeyboardInterrupt:  # before the launcher had its handlers in place
            return 130
    return 0


def _num_ranks(text: str) -> int:
    if text == "auto":
        from booster.device import device_type, num_devices

        return _num_cores() if device_type() == "cpu" else num_devices()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node={text} is no number of ranks: give a number from 1, or auto")
    return int(text)


def _num_cores() -> int:
    """Returns how many cores this process may use, which a container or a scheduler may have made fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.is_module and not Path(arguments.script).is_file():
        raise ConfigError(
            f"there is no file {arguments.script!r} (seen from {Path.cwd()}): correct the path, or write -m before a "
            "module's name"
        )
    if not 0 <= arguments.node_rank < arguments.nnodes:
        raise ConfigError(
            f"--node-rank={arguments.node_rank} with --nnodes={arguments.nnodes} is outside: machines count from 0 to "
            "nnodes - 1"
        )
    if arguments.nnodes > 1 and not arguments.master_addr:
        raise ConfigError(
            f"--nnodes={arguments.nnodes} without --master-addr: the machines can't find each other; "
            "give the address of machine 0, the same on all"
        )
    if arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts={arguments.max_restarts} is negative: give 0 for none, or how many")


def _launch_config(arguments: argparse.Namespace, num_ranks: int, log_dir: str) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if arguments.nnodes == 1:
        host = arguments.master_addr or "localhost"
        # An address that is this machine's for sure: looking up its full name can take long or fail in a container.
        place: dict[str, Any] = {"rdzv_backend": "c10d", "local_addr": host}
        place |= {"run_id": uuid.uuid4().hex, "rdzv_endpoint": f"{host}:{arguments.master_port or 0}"}
    else:
        port = arguments.master_port or _DEFAULT_PORT
        place = {"rdzv_backend": "static", "rdzv_configs": {"rank": arguments.node_rank}}
        place |= {"run_id": "booster", "rdzv_endpoint": f"{arguments.master_addr}:{port}"}
    return LaunchConfig(
        min_nodes=arguments.nnodes,
        max_nodes=arguments.nnodes,
        nproc_per_node=num_ranks,
        role="rank",
        max_restarts=arguments.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        **place,
    )


def _command(arguments: argparse.Namespace) -> list[str]:
    module_flag = ["-m"] if arguments.is_module else []
    command = [str(_WORKER), *module_flag, arguments.script, *arguments.script_args]
    return [part.replace("$", "$$") for part in command]  # torch fills in ${local_rank} and eats half of each $$


@contextmanager
def _environment(num_ranks: int) -> Iterator[None]:
    """Shares the cores out among the ranks, unless the user did: by default every rank would take all of them."""
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_ranks)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _silence_elastic_logs() -> None:
    """Leaves it to `report` to say what failed, unless the user asked for torch's logs."""
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
