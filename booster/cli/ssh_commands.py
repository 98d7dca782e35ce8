"""ssh commands that start the run on each host: pure functions, so that --dry-run prints the exact commands."""

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

# Variables for a script to find the same programs and communicate in the same way. CUDA_VISIBLE_DEVICES is excluded:
# it refers to this machine's devices.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LOGLEVEL")
_EXPORTED_PREFIXES = ("BOOSTER_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH_")
# torch's launcher warns with C++ stacks when the first host exits before the others. So the launchers on the hosts, but
# not their ranks, log errors only.
LAUNCHER_ONLY = "BOOSTER_LAUNCHER_ONLY"  # lists variables that the launcher removes before it starts ranks
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# No terminal for a password prompt. An unresponsive host is detected after a minute. The process of a shared connection
# would outlive ours and keep its pipes open.
_SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """Host name and the ssh command line that starts its launcher."""

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
    """Return a command for each host, in their order.

    Args:
        arguments: Parsed arguments of `booster run`.
        hosts: Hosts to start ranks on. The first one hosts the rendezvous, unless --master-addr gives another address.
        port: Port of the rendezvous.
        run_id: Identifies this run to separate it from others at the same port; None if --extra-launch-args has one.
        environment: Variables to set on the hosts.

    Raises:
        ConfigError: --ssh-options can't be parsed.
    """
    ssh = ["ssh", *_split_words(arguments.ssh_options or ""), *_SSH_OPTIONS]
    if arguments.ssh_port is not None:
        ssh += ["-p", str(arguments.ssh_port)]
    if arguments.ssh_user is not None:
        ssh += ["-l", arguments.ssh_user]
    commands = []
    for node_rank, host in enumerate(hosts):
        num_ranks = arguments.nproc_per_node or str(host.slots or 1)
        options = _run_options(arguments, len(hosts), hosts[0].name, port, run_id)
        host_options = ["--as-host", host.name, "--node-rank", str(node_rank), "--nproc-per-node", num_ranks]
        remote_command = _shell_command([*host_options, *options, *_script(arguments)], environment)
        commands.append(HostCommand(host=host.name, command=[*ssh, host.name, remote_command]))
    return commands


def exported_variables(environment: Mapping[str, str], requested: Sequence[str]) -> dict[str, str]:
    """Return the variables to set on the hosts: the default ones and those of --export.

    Args:
        environment: Environment of this process.
        requested: Values of --export: comma-separated names, or one NAME=VALUE each.

    Raises:
        ConfigError: A name is invalid or not set here.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if (name in _EXPORTED or name.startswith(_EXPORTED_PREFIXES)) and _VARIABLE.fullmatch(name)
    }
    for text in requested:
        assigned = "=" in text
        for part in [text] if assigned else text.split(","):
            name, _, value = part.partition("=")
            name = name.strip()
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(
                    f"--export={text}: {name!r} is not a variable name: write NAME, NAME,NAME or NAME=VALUE"
                )
            if not assigned and name not in environment:
                raise ConfigError(
                    f"--export={text}: {name} is not set here, so there is no value to export: set it, or write "
                    f"--export {name}=VALUE"
                )
            chosen[name] = value if assigned else environment[name]
    launcher_only = {name: value for name, value in _QUIET.items() if name not in chosen}
    return (
        dict(sorted(chosen.items()))
        | launcher_only
        | ({LAUNCHER_ONLY: ",".join(launcher_only)} if launcher_only else {})
    )


def _run_options(
    arguments: argparse.Namespace, num_hosts: int, first_host: str, port: int, run_id: str | None
) -> list[str]:
    num_machines = arguments.nnodes if ":" in (arguments.nnodes or "") else str(num_hosts)
    extra = " ".join([*([f"rdzv_id={run_id}"] if run_id else []), arguments.extra_launch_args or ""]).strip()
    rendezvous = ["--master-addr", arguments.master_addr or first_host, "--master-port", str(port)]
    if num_machines == "1" and arguments.master_port is None:  # no other host needs the rendezvous address
        rendezvous = []
    return [
        *("--nnodes", num_machines),
        *rendezvous,
        *("--max-restarts", str(arguments.max_restarts)),
        *("--extra-launch-args", extra),
    ]


def _script(arguments: argparse.Namespace) -> list[str]:
    return [*(["-m"] if arguments.is_module else []), arguments.script, *arguments.script_args]


def _shell_command(run: Sequence[str], environment: Mapping[str, str]) -> str:
    # For whichever shell the user has on the host: && and quotes mean the same in all.
    assignments = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *assignments, sys.executable, "-m", "booster", "run", *run]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--ssh-options={text!r} can't be parsed ({error}): write ssh's options as in a shell, with quotes around "
            "values that contain spaces"
        ) from error
