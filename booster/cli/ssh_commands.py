"""The ssh command that starts the same run on another host: pure, so that --dry-run prints what would be started."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from booster.cli.hosts import Host
from booster.errors import ConfigError

__all__ = ["LAUNCHER_ONLY", "HostCommand", "exported_variables", "host_commands"]

# What a script needs to find the same programs and to communicate in the same way. CUDA_VISIBLE_DEVICES is not among
# them: whoever set it, a scheduler for example, spoke of this machine's devices.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LOGLEVEL")
_EXPORTED_BEGINNINGS = ("BOOSTER_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH_")
# torch's own launcher warns, with stacks of C++, when the run's first host is done before the others: in the launchers
# on the hosts, but not in their ranks, only errors are shown.
LAUNCHER_ONLY = "BOOSTER_LAUNCHER_ONLY"  # names such variables, which the ranks do not get
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Nobody sits at these processes to type a password. A host that no longer answers is noticed after a minute. A shared
# connection's process would outlive ours and keep its pipes open.
_SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """What to start here for a host, a program and its arguments."""

    host: str
    command: list[str]


def host_commands(
    arguments: argparse.Namespace,
    hosts: Sequence[Host],
    *,
    port: int,
    run_id: str | None,
    environment: Mapping[str, str],
) -> list[HostCommand]:
    """Returns a command for each host, in their order.

    Args:
        arguments: Those of `booster run`.
        hosts: Where to start ranks; they meet at the first one, unless --master-addr says another address of it.
        port: The port where they meet.
        run_id: What keeps this run's ranks apart from another's that came to the same port; None where
            --extra-launch-args says it.
        environment: Variables that are set on the hosts.

    Raises:
        ConfigError: --ssh-options can't be divided into words.
    """
    ssh = ["ssh", *_words(arguments.ssh_options or ""), *_SSH_OPTIONS]
    if arguments.ssh_port is not None:
        ssh += ["-p", str(arguments.ssh_port)]
    if arguments.ssh_user is not None:
        ssh += ["-l", arguments.ssh_user]
    commands = []
    for node_rank, host in enumerate(hosts):
        num_ranks = arguments.nproc_per_node or str(host.slots or 1)
        options = _run_options(arguments, len(hosts), hosts[0].name, port, run_id)
        own = ["--as-host", host.name, "--node-rank", str(node_rank), "--nproc-per-node", num_ranks]
        there = _shell_command([*own, *options, *_script(arguments)], environment)
        commands.append(HostCommand(host=host.name, command=[*ssh, host.name, there]))
    return commands


def exported_variables(environment: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Returns the variables that go to the hosts: those that matter for every run, and those that were asked for.

    Args:
        environment: The variables here.
        wanted: The values of --export: names with commas between them, or one NAME=VALUE.

    Raises:
        ConfigError: A name can't be a variable's, or is not set here.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if (name in _EXPORTED or name.startswith(_EXPORTED_BEGINNINGS)) and _VARIABLE.fullmatch(name)
    }
    for text in wanted:
        assigned = "=" in text
        for part in [text] if assigned else text.split(","):
            name, _, value = part.partition("=")
            name = name.strip()
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(
                    f"--export={text}: {name!r} can't be the name of a variable: write NAME, NAME,NAME or NAME=VALUE"
                )
            if not assigned and name not in environment:
                raise ConfigError(
                    f"--export={text}: {name} is not set here, so there is nothing to hand on: set it, or write "
                    f"--export {name}=VALUE"
                )
            chosen[name] = value if assigned else environment[name]
    own = {name: value for name, value in _QUIET.items() if name not in chosen}
    return dict(sorted(chosen.items())) | own | ({LAUNCHER_ONLY: ",".join(own)} if own else {})


def _run_options(
    arguments: argparse.Namespace, num_hosts: int, first_host: str, port: int, run_id: str | None
) -> list[str]:
    num_machines = arguments.nnodes if ":" in (arguments.nnodes or "") else str(num_hosts)
    extra = " ".join([*([f"rdzv_id={run_id}"] if run_id else []), arguments.extra_launch_args or ""]).strip()
    place = ["--master-addr", arguments.master_addr or first_host, "--master-port", str(port)]
    if num_machines == "1" and arguments.master_port is None:  # nobody else has to know where its ranks meet
        place = []
    return [
        *("--nnodes", num_machines),
        *place,
        *("--max-restarts", str(arguments.max_restarts)),
        *("--extra-launch-args", extra),
    ]


def _script(arguments: argparse.Namespace) -> list[str]:
    return [*(["-m"] if arguments.is_module else []), arguments.script, *arguments.script_args]


def _shell_command(run: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns one line for the user's shell on the host, whichever that is: && and quotes mean the same in all."""
    assignments = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *assignments, sys.executable, "-m", "booster", "run", *run]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--ssh-options={text!r} is not understood ({error}): write ssh's options as in a shell, with quotes "
            "around what has blanks"
        ) from error
