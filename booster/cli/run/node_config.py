"""Configuration of torch's elastic launcher for this machine: pure functions, but for numbers of devices."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster import device
from booster.device import num_cores
from booster.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from .rendezvous_handler import RestartCount


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraArguments:
    """Fields of torch's LaunchConfig, and of its rendezvous configuration."""

    launch: dict[str, Any] = field(default_factory=dict)
    rendezvous: dict[str, Any] = field(default_factory=dict)


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError
    return text.lower() in ("1", "true")


_LAUNCH: dict[str, Callable[[str], Any]] = {
    "event_log_handler": str,
    "local_addr": str,
    "monitor_interval": float,
    "rdzv_backend": str,
    "rdzv_endpoint": str,
    "rdzv_id": str,
    "role": str,
    "shutdown_timeout": int,
    "signals_to_handle": str,
    "virtual_local_rank": _flag,
}
_RENDEZVOUS: dict[str, Callable[[str], Any]] = {
    "close_timeout": int,
    "heartbeat_timeout": int,
    "is_host": _flag,
    "join_timeout": int,
    "keep_alive_interval": int,
    "keep_alive_max_attempt": int,
    "last_call_timeout": int,
    "read_timeout": int,
    "store_type": str,
    "timeout": int,
}
_TYPE_NAMES = {int: "an integer", float: "a number", _flag: "0 or 1"}
_FIELDS = {"rdzv_id": "run_id"}  # option of torchrun -> field of LaunchConfig


def parse_extra_arguments(text: str) -> ExtraArguments:
    """Parse settings such as "monitor_interval=5 rdzv_id=job-7".

    Names are torchrun's options and fields of the rendezvous configuration, with "-" or "_"."""
    extra = ExtraArguments()
    for word in split_words("--extra-launch-args", text, "name=value"):
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        parse = _LAUNCH.get(name) or _RENDEZVOUS.get(name)
        if not equals or parse is None:
            raise ConfigError(
                f"--extra-launch-args: {word!r} is not a setting of torch's launcher: write name=value with one of "
                f"{', '.join(sorted(_LAUNCH | _RENDEZVOUS))}"
            )
        settings, name = (extra.launch, _FIELDS.get(name, name)) if name in _LAUNCH else (extra.rendezvous, name)
        if name in settings:
            raise ConfigError(f"--extra-launch-args: {word!r} repeats a setting: give it once")
        try:
            settings[name] = parse(value)
        except ValueError as error:
            raise ConfigError(
                f"--extra-launch-args: {word!r} has a value of the wrong type: give {_TYPE_NAMES[parse]}"
            ) from error
    return extra


def split_words(option: str, text: str, form: str) -> list[str]:
    """Split the value of an option into words as a shell does; `form` is what to write in it, for the message."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{option}={text!r} can't be parsed ({error}): write {form}, with quotes around values that contain spaces"
        ) from error


DEFAULT_PORT = 29500  # for several machines, as in torchrun: known to each before anything is started
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumNodes:
    """Number of machines, or a range of it (elastic)."""

    min_nodes: int
    max_nodes: int
    is_elastic: bool


def parse_num_nodes(text: str) -> NumNodes:
    """Parse --nnodes, N or MIN:MAX."""
    min_text, colon, max_text = text.partition(":")
    numbers = [min_text, max_text if colon else min_text]
    if not all(number.isdecimal() and int(number) >= 1 for number in numbers) or int(numbers[0]) > int(numbers[1]):
        raise ConfigError(
            f"--nnodes={text} is not a number of machines: give a number from 1, or MIN:MAX for a run that continues "
            "with fewer, as in 2:4"
        )
    return NumNodes(min_nodes=int(numbers[0]), max_nodes=int(numbers[1]), is_elastic=bool(colon))


def parse_nproc_per_node(text: str) -> int:
    """Parse --nproc-per-node: the number of ranks of this machine."""
    if text == "auto":
        return num_cores() if device.device_type() == "cpu" else device.num_devices()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node={text} is not a number of ranks: give a number from 1, or auto")
    return int(text)


@contextmanager
def default_omp_threads(num_ranks: int) -> Iterator[None]:
    """Set OMP_NUM_THREADS to a rank's share of the cores, unless it is set: torch defaults to all cores per rank."""
    saved = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", _num_threads(num_ranks))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def launch_config(
    arguments: argparse.Namespace, num_ranks: int, logs: LogsSpecs, restart_count: RestartCount
) -> LaunchConfig:
    """Return the configuration of torch's launcher, which sets the restart count if there are several machines."""
    from torch.distributed.launcher.api import LaunchConfig

    from . import rendezvous_handler
    from .signals import termination_signals

    num_nodes = parse_num_nodes(arguments.nnodes or "1")
    settings = _settings(arguments)
    unknown = settings.keys() - {field.name for field in fields(LaunchConfig)}
    if unknown:
        raise ConfigError(
            f"--extra-launch-args: this torch's launcher has no {', '.join(sorted(unknown))}: omit it, or install a "
            "newer torch"
        )
    settings.setdefault("signals_to_handle", ",".join(number.name for number in termination_signals()))
    if num_nodes.max_nodes > 1 and settings["rdzv_backend"] == "c10d":
        rendezvous_handler.register()
        settings["rdzv_backend"] = rendezvous_handler.BACKEND
        settings["rdzv_configs"] |= {"wanted_rank": arguments.node_rank, "attempt": restart_count}
    return LaunchConfig(
        min_nodes=num_nodes.min_nodes,
        max_nodes=num_nodes.max_nodes,
        nproc_per_node=num_ranks,
        max_restarts=arguments.max_restarts,
        logs_specs=logs,
        **settings,
    )


def rank_variables(rank: int, num_ranks: int, port: int, restart_count: int = 0) -> dict[str, str]:
    """Return torchrun's variables of a rank of this machine, for a store that the process that starts it serves."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
    }


def script_words(arguments: argparse.Namespace) -> list[str]:
    """Return the script or module with its arguments, as the interpreter takes them."""
    return [*(["-m"] if arguments.is_module else []), arguments.script, *arguments.script_args]


def worker_command(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments of the Python interpreter for each rank."""
    command = [str(_WORKER), *script_words(arguments)]
    return [part.replace("$", "$$") for part in command]  # torch substitutes ${local_rank} and unescapes $$


def torchrun_command(arguments: argparse.Namespace, num_ranks: int) -> str:
    """Return the shell command by which torchrun starts the same ranks on this machine."""
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
    """Return fields of LaunchConfig: the rendezvous settings, overridden by those of the user."""
    num_nodes = parse_num_nodes(arguments.nnodes or "1")
    configs: dict[str, Any] = {}
    if num_nodes.max_nodes == 1:
        host = arguments.master_addr or "localhost"
        # A local address without a lookup: resolving the FQDN can take long or fail in a container.
        rendezvous = {"rdzv_backend": "c10d", "local_addr": host, "run_id": uuid.uuid4().hex}
        rendezvous["rdzv_endpoint"] = f"{host}:{arguments.master_port or 0}"
    else:
        rendezvous = {"rdzv_backend": "static", "run_id": "booster"}
        rendezvous["rdzv_endpoint"] = f"{arguments.master_addr}:{arguments.master_port or DEFAULT_PORT}"
        if num_nodes.is_elastic or arguments.max_restarts > 0:  # more rounds: after a join, a leave or a restart
            rendezvous["rdzv_backend"] = "c10d"
    extra = parse_extra_arguments(arguments.extra_launch_args)
    settings: dict[str, Any] = {"role": "rank"} | rendezvous | extra.launch
    # The machines of a range may join and leave without a rank.
    has_node_rank = arguments.node_rank is not None or not num_nodes.is_elastic
    if settings["rdzv_backend"] == "static":
        configs["rank"] = arguments.node_rank or 0
    elif num_nodes.max_nodes > 1 and settings["rdzv_backend"] == "c10d" and has_node_rank:
        configs["is_host"] = (arguments.node_rank or 0) == 0
    return settings | {"rdzv_configs": configs | extra.rendezvous}
