"""Hosts of `booster run`, from a host file or a list, with include and exclude filters."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from booster.errors import ConfigError

from .node_config import script_words, split_words

# No leading "-": ssh would parse it as an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.%-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine to start ranks on, by the name that ssh and the other hosts use, and its number of ranks, if listed."""

    name: str
    slots: int | None = None


def choose_hosts(
    *, listed: str | None = None, hostfile: str | None = None, include: str | None = None, exclude: str | None = None
) -> list[Host]:
    """Return the hosts in the order of the list or the file; the first one hosts the rendezvous.

    Names are separated by commas. A line of the host file is a name, optionally followed by `slots=N`; `#` starts a
    comment.

    Raises:
        ConfigError: No hosts are given or left, a line or name is invalid, or a name is repeated or unknown.
    """
    if listed is not None and hostfile is not None:
        raise ConfigError(
            f"--host={listed} and --hostfile={hostfile} both list hosts: give one of them; --include and --exclude "
            "filter a host file"
        )
    if hostfile is not None:
        source, hosts = f"--hostfile={hostfile}", _read_file(hostfile)
    else:
        source, hosts = f"--host={listed}", [Host(name=name) for name in _names("--host", listed or "")]
    if include is not None and exclude is not None:
        raise ConfigError(f"--include={include} and --exclude={exclude} can't be combined: give one of them")
    known = [host.name for host in hosts]
    if include is not None:
        kept = _check_known("--include", include, known, source)
        return [host for host in hosts if host.name in kept]
    if exclude is not None:
        excluded = _check_known("--exclude", exclude, known, source)
        hosts = [host for host in hosts if host.name not in excluded]
        if not hosts:
            raise ConfigError(f"--exclude={exclude} leaves none of the hosts of {source}: exclude fewer of them")
    return hosts


def first_hosts(hosts: Sequence[Host], num_machines: int) -> list[Host]:
    """Return the first `num_machines` hosts.

    Raises:
        ConfigError: There are fewer, or loopback names are mixed with others.
    """
    if num_machines > len(hosts):
        raise ConfigError(
            f"--nnodes={num_machines} is more than the {len(hosts)} host(s) {', '.join(host.name for host in hosts)}: "
            "list more hosts, or omit --nnodes to use all of them"
        )
    chosen = list(hosts[:num_machines])
    loopbacks = [host.name for host in chosen if is_loopback(host.name)]
    if loopbacks and len(loopbacks) < len(chosen):
        raise ConfigError(
            f"{loopbacks[0]} is a loopback name, which other hosts can't reach: write the name or the address of this "
            "machine in their network"
        )
    return chosen


def is_loopback(name: str) -> bool:
    """Return whether a host's name is a loopback name or address."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name in ("localhost", "ip6-localhost") or name.endswith(".localhost")


def _read_file(path: str) -> list[Host]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--hostfile={path} can't be read ({error}): give a text file with one host per line, as in: node-1 slots=4"
        ) from error
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile={path}, line {number}"
        host = Host(name=_check_name(where, words[0]), slots=_slots(where, words[1:]))
        if host.name in hosts:
            raise ConfigError(f"{where}: {host.name} is listed twice: keep one line, with all its slots")
        hosts[host.name] = host
    if not hosts:
        raise ConfigError(f"--hostfile={path} lists no host: write one per line, as in: node-1 slots=4")
    return list(hosts.values())


def _slots(where: str, words: list[str]) -> int | None:
    if not words:
        return None
    name, _, count = words[0].partition("=")
    if len(words) > 1 or name != "slots" or not count.isdecimal() or int(count) < 1:
        raise ConfigError(
            f"{where}: {' '.join(words)!r} after the name can't be parsed: write a name, optionally followed by "
            "slots=N, as in: node-1 slots=4"
        )
    return int(count)


def _names(option: str, text: str) -> list[str]:
    names = [_check_name(option, name.strip()) for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option}={text!r} lists no host: give comma-separated names, as in: node-1,node-2")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{option}={text} lists {twice} twice: list it once, and use --nproc-per-node, or slots=N in a host file, "
            "for more ranks"
        )
    return names


def _check_known(option: str, text: str, known: list[str], source: str) -> set[str]:
    names = _names(option, text)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"{option}={text}: {', '.join(unknown)} is not a host of {source}: choose from {', '.join(known)}"
        )
    return set(names)


def _check_name(where: str, name: str) -> str:
    if _NAME.fullmatch(name):
        return name
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return name
    hint = "give the name alone"
    if "@" in name:
        hint = "give the name alone, and the user with --ssh-user"
    elif ":" in name:
        hint = "give the name alone, the port of sshd with --ssh-port, and the ranks with slots=N in a host file"
    raise ConfigError(f"{where}: {name!r} is not a valid host name: {hint}")


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


def host_commands(
    arguments: argparse.Namespace,
    hosts: Sequence[Host],
    *,
    port: int,
    run_id: str | None,
    environment: Mapping[str, str],
) -> dict[str, list[str]]:
    """Return the ssh command line that starts the launcher of each host, by its name, in their order.

    The first host has the rendezvous at the port, unless --master-addr gives another address. The run's id separates it
    from others at the same port; it is None if --extra-launch-args has one.

    Raises:
        ConfigError: --ssh-options can't be parsed.
    """
    ssh_options = split_words("--ssh-options", arguments.ssh_options or "", "ssh's options as in a shell")
    ssh = ["ssh", *ssh_options, *_SSH_OPTIONS]
    if arguments.ssh_port is not None:
        ssh += ["-p", str(arguments.ssh_port)]
    if arguments.ssh_user is not None:
        ssh += ["-l", arguments.ssh_user]
    start = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-m", "booster", "run"]
    num_machines = arguments.nnodes if ":" in (arguments.nnodes or "") else str(len(hosts))
    options = ["--nnodes", num_machines]
    if num_machines != "1" or arguments.master_port is not None:  # else no other host needs the rendezvous address
        options += ["--master-addr", arguments.master_addr or hosts[0].name, "--master-port", str(port)]
    extra = " ".join([*([f"rdzv_id={run_id}"] if run_id else []), arguments.extra_launch_args]).strip()
    options += ["--max-restarts", str(arguments.max_restarts), "--extra-launch-args", extra]
    commands = {}
    for node_rank, host in enumerate(hosts):
        num_ranks = arguments.nproc_per_node or str(host.slots or 1)
        host_options = ["--as-host", host.name, "--node-rank", str(node_rank), "--nproc-per-node", num_ranks]
        # For whichever shell the user has on the host: && and quotes mean the same in all.
        command = shlex.join([*start, *host_options, *options, *script_words(arguments)])
        commands[host.name] = [*ssh, host.name, f"cd {shlex.quote(os.getcwd())} && exec {command}"]
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
    listed = {LAUNCHER_ONLY: ",".join(launcher_only)} if launcher_only else {}
    return dict(sorted(chosen.items())) | launcher_only | listed
