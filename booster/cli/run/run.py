"""`booster run`: launch a script on several ranks of this machine or of several hosts."""

from __future__ import annotations

import argparse
import os
import shlex
import uuid
from pathlib import Path
from typing import Any

from booster.cli.arguments import add_command, add_option
from booster.errors import BoosterError, ConfigError, RankFailedError

from .hosts import Host, choose_hosts, exported_variables, first_hosts, host_commands, is_loopback
from .node_config import (
    DEFAULT_PORT,
    NumNodes,
    parse_extra_arguments,
    parse_nproc_per_node,
    parse_num_nodes,
    torchrun_command,
)

_DESCRIPTION = """\
Start a script on several ranks of this machine, or over ssh on several hosts. The exit code is that of the rank that
failed first, and its traceback is printed last.
"""
_EXAMPLES = """\
Every host must accept your ssh key without a prompt, and have this directory, the script and this Python at the same
paths. The rendezvous is on the first host, by the name given for it (or --master-addr), at port 29500 (or
--master-port). PATH, PYTHON*, VIRTUAL_ENV, LD_LIBRARY_PATH and BOOSTER_*, TORCH_*, PYTORCH_*, NCCL_*, GLOO_*, OMP_*,
MKL_*, KMP_* are exported to the hosts.

examples:
  booster run --nproc-per-node 2 train.py --lr 1e-3
  booster run --nproc-per-node auto -m package.train
  booster run --host node-1,node-2 --nproc-per-node 8 train.py
  booster run --hostfile hosts.txt --exclude node-3 --export HF_HOME --dry-run train.py
  booster run --hostfile hosts.txt --nnodes 2:4 --max-restarts 3 train.py
  booster run --nnodes 2 --node-rank 1 --master-addr node-1 train.py   (by hand, on each machine)

hosts.txt:
  node-1 slots=8
  node-2 slots=8   # a comment
"""


def add_parser(commands: Any) -> None:
    """Add the parser of `booster run` to argparse's subparsers."""
    parser = add_command(
        commands,
        "run",
        run,
        help="start a script on several ranks of one or more machines",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    add_option(
        parser,
        "--nproc-per-node",
        "--nproc",
        metavar="N",
        help="ranks per machine, or auto (1, or slots of the host file)",
    )
    add_option(
        parser, "--nnodes", metavar="N|MIN:MAX", help="machines; MIN:MAX to continue with fewer (1, or all hosts)"
    )
    add_option(
        parser, "--node-rank", type=int, metavar="N", help="index of this machine, if each is started by hand (0)"
    )
    add_option(parser, "--master-addr", metavar="HOST", help="address of machine 0 (the first host)")
    add_option(
        parser, "--master-port", type=int, metavar="PORT", help="port there (a free one; 29500 for several machines)"
    )
    add_option(
        parser, "--max-restarts", type=int, default=0, metavar="N", help="restarts of all ranks after a failure (0)"
    )
    add_option(
        parser,
        "--extra-launch-args",
        default="",
        metavar="TEXT",
        help='settings of torch\'s launcher: "name=value name=value"',
    )
    add_option(parser, "--dry-run", action="store_true", help="print the commands and start nothing")
    parser.add_argument("-m", dest="is_module", action="store_true", help="script is the name of a module")
    hosts = parser.add_argument_group("several hosts")
    hosts.add_argument("-H", "--host", metavar="A,B", help="hosts to start ranks on")
    add_option(hosts, "--hostfile", metavar="FILE", help="file with one host per line, optionally followed by slots=N")
    add_option(hosts, "--include", metavar="A,B", help="use only these hosts")
    add_option(hosts, "--exclude", metavar="A,B", help="use all hosts but these")
    add_option(hosts, "--ssh-port", type=int, metavar="PORT", help="port of sshd (from ssh's configuration)")
    add_option(hosts, "--ssh-user", metavar="NAME", help="user to log in as (from ssh's configuration)")
    add_option(hosts, "--ssh-options", metavar="TEXT", help='options of ssh: "-i key -o ProxyJump=gate"')
    hosts.add_argument(
        "--export", action="append", metavar="NAMES|NAME=VALUE", help="more variables to export; may be repeated"
    )
    parser.add_argument("--as-host", help=argparse.SUPPRESS)  # name of the host, given to its launcher
    parser.add_argument("script", help="path of a Python file")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks and wait for them.

    Returns:
        Exit code: 0, or that of the rank that failed first. As in a shell, a rank or launcher killed by signal n counts
        as 128 + n.

    Raises:
        ConfigError: The arguments are invalid; nothing was started.
    """
    try:
        return _run(arguments)
    except BoosterError as error:
        if arguments.as_host is None:
            raise
        from .launcher_protocol import send_error

        send_error(str(error), is_consequence=isinstance(error, RankFailedError))
        return 2


def _run(arguments: argparse.Namespace) -> int:
    num_nodes = parse_num_nodes(arguments.nnodes) if arguments.nnodes is not None else None
    _check_numbers(arguments)
    if arguments.host is not None or arguments.hostfile is not None:
        hosts = _hosts(arguments, num_nodes)
        if len(hosts) > 1 or not is_loopback(hosts[0].name):
            return _run_on_hosts(arguments, hosts, num_nodes)
        arguments.nproc_per_node = arguments.nproc_per_node or str(hosts[0].slots or 1)  # this machine, without ssh
    else:
        _check_no_host_options(arguments)
    num_ranks = parse_nproc_per_node(arguments.nproc_per_node or "1")
    _check_machine(arguments, num_nodes or parse_num_nodes("1"))
    if arguments.dry_run:
        print(torchrun_command(arguments, num_ranks))
        return 0
    from .elastic_agent import launch_node

    return launch_node(arguments, num_ranks)


def _run_on_hosts(arguments: argparse.Namespace, hosts: list[Host], num_nodes: NumNodes | None) -> int:
    if arguments.node_rank is not None:
        raise ConfigError(
            f"--node-rank={arguments.node_rank} can't be combined with hosts, which are numbered in the listed order: "
            "omit it, or start each machine by hand, without --host and --hostfile"
        )
    if arguments.nproc_per_node not in (None, "auto"):
        parse_nproc_per_node(arguments.nproc_per_node)
    extra = parse_extra_arguments(arguments.extra_launch_args)
    commands = host_commands(
        arguments,
        hosts,
        port=arguments.master_port or DEFAULT_PORT,
        run_id=None if "run_id" in extra.launch else f"booster-{uuid.uuid4().hex[:8]}",
        environment=exported_variables(os.environ, arguments.export or []),
    )
    if arguments.dry_run:
        for command in commands.values():
            print(shlex.join(command))
        return 0
    from .multi_node import launch_nodes

    min_hosts = num_nodes.min_nodes if num_nodes is not None else len(hosts)
    # Seconds between SIGTERM and SIGKILL in torch's launcher.
    grace_seconds = extra.launch.get("shutdown_timeout", os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
    return launch_nodes(commands, min_hosts, grace_seconds=float(grace_seconds))


def _hosts(arguments: argparse.Namespace, num_nodes: NumNodes | None) -> list[Host]:
    hosts = choose_hosts(
        listed=arguments.host, hostfile=arguments.hostfile, include=arguments.include, exclude=arguments.exclude
    )
    if num_nodes is None:
        return first_hosts(hosts, len(hosts))
    most = num_nodes.max_nodes
    return first_hosts(hosts, min(most, max(num_nodes.min_nodes, len(hosts))) if num_nodes.is_elastic else most)


def _check_numbers(arguments: argparse.Namespace) -> None:
    if arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts={arguments.max_restarts} is negative: give 0 or more")
    for name in ("master_port", "ssh_port"):
        port = getattr(arguments, name)
        min_port = 1 if name == "ssh_port" else 0  # 0: torch's launcher chooses a free port
        if port is not None and not min_port <= port < 2**16:
            raise ConfigError(f"--{name.replace('_', '-')}={port} is not a port: give a number in 1 .. 65535")
    parse_extra_arguments(arguments.extra_launch_args)


def _check_no_host_options(arguments: argparse.Namespace) -> None:
    names = ("include", "exclude", "ssh_port", "ssh_user", "ssh_options", "export")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)} without hosts has no effect, as all ranks start on this machine: add --host or "
            "--hostfile, or omit it"
        )


def _check_machine(arguments: argparse.Namespace, num_nodes: NumNodes) -> None:
    if not arguments.is_module and not Path(arguments.script).is_file():
        raise ConfigError(
            f"there is no file {arguments.script!r} (relative to {Path.cwd()}): correct the path, or write -m before "
            "the name of a module"
        )
    if arguments.node_rank is not None and not 0 <= arguments.node_rank < num_nodes.max_nodes:
        raise ConfigError(
            f"--node-rank={arguments.node_rank} is out of range for --nnodes={arguments.nnodes or 1}: give 0 to "
            "nnodes - 1"
        )
    if num_nodes.max_nodes > 1 and not arguments.master_addr:
        raise ConfigError(
            f"--nnodes={arguments.nnodes} without --master-addr leaves the machines without a rendezvous: give the "
            "address of machine 0, the same on all, or list the machines with --host A,B"
        )
