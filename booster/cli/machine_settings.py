"""What torch's elastic launcher is told for this machine's part of a run: pure, but for the number of cores."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster.cli.launch_arguments import parse_extra_arguments
from booster.errors import ConfigError

if TYPE_CHECKING:  # torch takes a second, which a mistake in the arguments shouldn't cost
    from torch.distributed.elastic.multiprocessing.api import LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from booster.cli.agreed_rendezvous import Attempt

__all__ = [
    "DEFAULT_PORT",
    "NumMachines",
    "launch_config",
    "num_cores",
    "parse_num_machines",
    "parse_num_ranks",
    "shared_cores",
    "torchrun_command",
    "worker_command",
]

DEFAULT_PORT = 29500  # of several machines, as torchrun's: each must know it before anything is started
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumMachines:
    """How many machines take part: a number, or from as many to as many."""

    least: int
    most: int
    is_range: bool

    def meet_anew(self, max_restarts: int) -> bool:
        """Returns whether machines have to meet while a run goes on: as one joins or leaves, or ranks restart."""
        return self.most > 1 and (self.is_range or max_restarts > 0)


def parse_num_machines(text: str) -> NumMachines:
    """Returns the numbers of --nnodes, N or MIN:MAX.

    Raises:
        ConfigError: The text is neither.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most if colon else least]
    if not all(number.isdecimal() and int(number) >= 1 for number in numbers) or int(numbers[0]) > int(numbers[1]):
        raise ConfigError(
            f"--nnodes={text} is no number of machines: give a number from 1, or MIN:MAX for a run that goes on with "
            "fewer, as in 2:4"
        )
    return NumMachines(least=int(numbers[0]), most=int(numbers[1]), is_range=bool(colon))


def parse_num_ranks(text: str) -> int:
    """Returns the number of ranks of this machine that --nproc-per-node asks for.

    Raises:
        ConfigError: The text is neither a number from 1 nor "auto".
    """
    if text == "auto":
        from booster.device import device_type, num_devices

        return num_cores() if device_type() == "cpu" else num_devices()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node={text} is no number of ranks: give a number from 1, or auto")
    return int(text)


def num_cores() -> int:
    """Returns how many cores this process may use, which a container or a scheduler may have made fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def shared_cores(num_ranks: int) -> Iterator[None]:
    """Shares the cores out among the ranks, unless the user did: by default every rank would take all of them."""
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", _num_threads(num_ranks))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch_config(arguments: argparse.Namespace, num_ranks: int, logs: LogsSpecs, attempt: Attempt) -> LaunchConfig:
    """Returns the configuration of torch's launcher.

    Args:
        arguments: Those of `booster run`.
        num_ranks: How many ranks this machine starts.
        logs: Where the ranks write.
        attempt: Is told the number of each start, where machines meet anew.

    Raises:
        ConfigError: A setting of --extra-launch-args is none of this torch's.
    """
    from torch.distributed.launcher.api import LaunchConfig

    from booster.cli import agreed_rendezvous
    from booster.cli.ending import ending_signals

    machines = parse_num_machines(arguments.nnodes or "1")
    settings = _settings(arguments)
    unknown = settings.keys() - {field.name for field in fields(LaunchConfig)}
    if unknown:
        raise ConfigError(
            f"--extra-launch-args: this torch's launcher has no {', '.join(sorted(unknown))}: leave it out, or install "
            "a newer torch"
        )
    settings.setdefault("signals_to_handle", ",".join(number.name for number in ending_signals()))
    if machines.most > 1 and settings["rdzv_backend"] == "c10d":
        agreed_rendezvous.register()
        settings["rdzv_backend"] = agreed_rendezvous.BACKEND
        settings["rdzv_configs"] |= {"wanted_rank": arguments.node_rank, "attempt": attempt}
    return LaunchConfig(
        min_nodes=machines.least,
        max_nodes=machines.most,
        nproc_per_node=num_ranks,
        max_restarts=arguments.max_restarts,
        logs_specs=logs,
        **settings,
    )


def worker_command(arguments: argparse.Namespace) -> list[str]:
    """Returns what the interpreter gets for each rank."""
    module_flag = ["-m"] if arguments.is_module else []
    command = [str(_WORKER), *module_flag, arguments.script, *arguments.script_args]
    return [part.replace("$", "$$") for part in command]  # torch fills in ${local_rank} and eats half of each $$


def torchrun_command(arguments: argparse.Namespace, num_ranks: int) -> str:
    """Returns a line for a shell by which torchrun starts the same ranks on this machine.

    Raises:
        ConfigError: --extra-launch-args can't be understood.
    """
    settings = _settings(arguments)
    configs = settings.pop("rdzv_configs")
    options = {"nnodes": arguments.nnodes or "1", "nproc-per-node": num_ranks, "max-restarts": arguments.max_restarts}
    if settings["rdzv_backend"] == "static":
        host, _, port = settings.pop("rdzv_endpoint").rpartition(":")
        options |= {"node-rank": configs.pop("rank"), "master-addr": host, "master-port": port}
    options["rdzv-id"] = settings.pop("run_id")
    options |= {name.replace("_", "-"): value for name, value in settings.items()}
    words = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value is not False
    ]
    if configs:
        words.append(f"--rdzv-conf={','.join(f'{name}={value}' for name, value in configs.items())}")
    threads = os.environ.get("OMP_NUM_THREADS") or _num_threads(num_ranks)
    start = ["env", f"OMP_NUM_THREADS={threads}", sys.executable, "-m", "torch.distributed.run"]
    return shlex.join([*start, *words, *worker_command(arguments)])


def _num_threads(num_ranks: int) -> str:
    return str(max(1, num_cores() // num_ranks))


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns fields of LaunchConfig: where the machines meet, overridden and completed by the user's own."""
    machines = parse_num_machines(arguments.nnodes or "1")
    configs: dict[str, Any] = {}
    if machines.most == 1:
        host = arguments.master_addr or "localhost"
        # An address that is this machine's for sure: looking up its full name can take long or fail in a container.
        place = {"rdzv_backend": "c10d", "local_addr": host, "run_id": uuid.uuid4().hex}
        place["rdzv_endpoint"] = f"{host}:{arguments.master_port or 0}"
    else:
        place = {"rdzv_backend": "static", "run_id": "booster"}
        place["rdzv_endpoint"] = f"{arguments.master_addr}:{arguments.master_port or DEFAULT_PORT}"
        if machines.meet_anew(arguments.max_restarts):
            place["rdzv_backend"] = "c10d"
    extra = parse_extra_arguments(arguments.extra_launch_args or "")
    settings: dict[str, Any] = {"role": "rank"} | place | extra.launch
    if settings["rdzv_backend"] == "static":
        configs["rank"] = arguments.node_rank or 0
    elif machines.most > 1 and settings["rdzv_backend"] == "c10d" and _is_numbered(arguments, machines):
        configs["is_host"] = (arguments.node_rank or 0) == 0
    return settings | {"rdzv_configs": configs | extra.rendezvous}


def _is_numbered(arguments: argparse.Namespace, machines: NumMachines) -> bool:
    """Returns whether this machine's number is known; machines of a range may come and go without numbers."""
    return arguments.node_rank is not None or not machines.is_range
