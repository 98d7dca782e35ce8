"""Node launcher: starts this machine's ranks by torch's elastic launcher and reports how they exited."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from booster.errors import ConfigError, RankFailedError, first_line

from . import launcher_protocol
from .exit_report import exit_code_of, report
from .hosts import LAUNCHER_ONLY
from .node_config import default_omp_threads, launch_config, worker_command

if TYPE_CHECKING:
    from .log_prefix import PrefixedOutput


def launch_node(arguments: argparse.Namespace, num_ranks: int) -> int:
    """Start this machine's ranks and wait for them. Must be called in the main thread.

    Returns:
        Exit code: 0, or that of the rank that failed first. As in a shell, a rank or launcher killed by signal n counts
        as 128 + n.

    Raises:
        ConfigError: The rendezvous of the machines failed, or this torch's launcher lacks a setting.
        RankFailedError: Ranks can't be restarted, because another machine's launcher exited.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from .signals import terminate_on_signal

    log_dir = tempfile.mkdtemp(prefix="booster_run_")
    try:
        with (
            default_omp_threads(num_ranks),
            _serve_remote_launcher(arguments.as_host) as (output, stdin_fd),
            terminate_on_signal(stdin_fd=stdin_fd, clean_up=lambda: shutil.rmtree(log_dir, ignore_errors=True)),
        ):
            return _launch(arguments, num_ranks, log_dir, output)
    except SignalException as error:
        if arguments.as_host is None:  # else the launcher that started this one reports it once for all hosts
            print(f"booster run: terminated by {error.sigval.name}, with all ranks", file=sys.stderr)
        return 128 + int(error.sigval)
    except KeyboardInterrupt:  # while our handlers are not installed
        return 130
    finally:
        shutil.rmtree(log_dir, ignore_errors=True)


def _launch(arguments: argparse.Namespace, num_ranks: int, log_dir: str, output: PrefixedOutput | None) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    from .elastic_agent import ExitRecords, record_exits
    from .log_prefix import RankLogs
    from .rendezvous_handler import RestartCount

    restart_count = RestartCount()
    records = ExitRecords(host=arguments.as_host or "", restart_count=restart_count)
    logs = RankLogs(log_dir, output, lambda: restart_count.value)
    config = launch_config(arguments, num_ranks, logs, restart_count)
    _silence_elastic_logs()
    try:
        with record_exits(records):
            elastic_launch(config, sys.executable)(*worker_command(arguments))
    except ChildFailedError as error:
        failures = records.with_exit_causes(error.failures)
        if config.max_restarts:
            line = f"booster run: all restarts of --max-restarts {config.max_restarts} are used, so the run ends"
            print(line, file=sys.stderr, flush=True)
        if output is None:
            print(report(failures, logs.world_size), file=sys.stderr, flush=True)
        else:
            launcher_protocol.send_failures(failures, logs.world_size)
        if records.last_heartbeats:  # last: a heartbeat must not be mistaken for the position of the failure
            print(records.last_heartbeats, file=sys.stderr, flush=True)
        return exit_code_of(failures)
    except RendezvousClosedError as error:
        raise RankFailedError(
            "another machine of this run exited while the ranks were being restarted: see its output, and start all "
            "machines again"
        ) from error
    except (DistError, RendezvousError) as error:
        reason = first_line(error.__cause__ or error)
        raise ConfigError(
            f"the rendezvous at {config.rdzv_endpoint} failed ({reason}): check that all machines of the run were "
            "started, the address is machine 0's, and its port is open and free, or change them with --master-addr and "
            "--master-port"
        ) from error
    return 0


@contextmanager
def _serve_remote_launcher(name: str | None) -> Iterator[tuple[PrefixedOutput | None, int | None]]:
    """Serve the launcher that started this one over ssh, see Note [Launcher protocol].

    The exit of that launcher closes this process's stdin. Ranks get /dev/null instead, as they would consume stdin.
    """
    if name is None:
        yield None, None
        return
    from .log_prefix import PrefixedOutput

    for variable in os.environ.pop(LAUNCHER_ONLY, "").split(","):
        os.environ.pop(variable, None)
    launcher_protocol.send_started()
    stdin_fd = os.dup(0)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    output = PrefixedOutput(name)
    try:
        yield output, stdin_fd
    finally:
        output.close()
        os.dup2(stdin_fd, 0)
        os.close(stdin_fd)


def _silence_elastic_logs() -> None:
    # `report` prints the failures; torch's logs repeat them, unless the user asked for them.
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each logger has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)
