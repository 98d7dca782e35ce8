"""This machine's part of a run: its ranks, started by torch's elastic launcher, and how they ended."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from booster.cli import host_messages
from booster.cli.failure import exit_code_of, last_start_line, report
from booster.cli.machine_settings import launch_config, shared_cores, worker_command
from booster.cli.ssh_commands import LAUNCHER_ONLY
from booster.errors import ConfigError, RankFailedError

if TYPE_CHECKING:
    from booster.cli.rank_output import LabelledOutput

__all__ = ["start_ranks"]


def start_ranks(arguments: argparse.Namespace, num_ranks: int) -> int:
    """Starts this machine's ranks, waits for them, and returns 0 or the exit code of the rank that failed first.

    A rank that was killed by a signal counts as 128 + the signal's number, as in a shell; so does this process.
    Must be called in the main thread.

    Raises:
        ConfigError: The machines can't meet, or a setting is none of this torch's.
        RankFailedError: Ranks can't start anew, because another machine's launcher ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from booster.cli.ending import ends_when_told

    log_dir = tempfile.mkdtemp(prefix="booster_run_")
    try:
        with (
            shared_cores(num_ranks),
            _host_side(arguments.as_host) as (output, told_by),
            ends_when_told(by_fd=told_by, clean_up=lambda: shutil.rmtree(log_dir, ignore_errors=True)),
        ):
            return _launch(arguments, num_ranks, log_dir, output)
    except SignalException as error:
        if arguments.as_host is None:  # who started this launcher and ended it says it once for all hosts
            print(f"booster run: ended by {error.sigval.name}, and all ranks with it", file=sys.stderr)
        return 128 + int(error.sigval)
    except KeyboardInterrupt:  # before or after our handlers were in place
        return 130
    finally:
        shutil.rmtree(log_dir, ignore_errors=True)


def _launch(arguments: argparse.Namespace, num_ranks: int, log_dir: str, output: LabelledOutput | None) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    from booster.cli.agreed_rendezvous import Attempt
    from booster.cli.rank_agent import RankNotes, ranks_noted
    from booster.cli.rank_output import RankLogs

    attempt = Attempt()
    notes = RankNotes(host=arguments.as_host or "", attempt=attempt)
    logs = RankLogs(log_dir, output, lambda: attempt.number)
    config = launch_config(arguments, num_ranks, logs, attempt)
    _silence_elastic_logs()
    try:
        with ranks_noted(notes):
            elastic_launch(config, sys.executable)(*worker_command(arguments))
    except ChildFailedError as error:
        failures = notes.explained(error.failures)
        if config.max_restarts:
            print(last_start_line(config.max_restarts), file=sys.stderr, flush=True)
        if output is None:
            print(report(failures, logs.world_size), file=sys.stderr, flush=True)
        else:
            host_messages.tell_failures(failures, logs.world_size)
        if notes.signs:  # after who was killed: a place must not be taken for that of its death
            print(notes.signs, file=sys.stderr, flush=True)
        return exit_code_of(failures)
    except RendezvousClosedError as error:
        raise RankFailedError(
            "another machine of this run ended while the ranks were to start anew: look at its output, and start all "
            "machines again"
        ) from error
    except (DistError, RendezvousError) as error:
        raise _cannot_meet(config, error) from error
    return 0


def _cannot_meet(config: Any, error: Exception) -> ConfigError:
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    return ConfigError(
        f"the launchers can't meet at {config.rdzv_endpoint} ({reason}): look whether all machines of the run were "
        "started, the address is machine 0's, and the port there is open and free; or write others with --master-addr "
        "and --master-port"
    )


@contextmanager
def _host_side(name: str | None) -> Iterator[tuple[LabelledOutput | None, int | None]]:
    """Sets up what the launcher that started this one by ssh expects of it, see Note [Lines of a host].

    Its end, however it comes, closes this process's stdin. The ranks get none: they would take that from us.
    """
    if name is None:
        yield None, None
        return
    from booster.cli.rank_output import LabelledOutput

    for variable in os.environ.pop(LAUNCHER_ONLY, "").split(","):
        os.environ.pop(variable, None)
    host_messages.tell_started()
    told_by = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    output = LabelledOutput(name)
    try:
        yield output, told_by
    finally:
        output.close()
        os.dup2(told_by, 0)
        os.close(told_by)


def _silence_elastic_logs() -> None:
    """Leaves it to `report` to say what failed, unless the user asked for torch's logs."""
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
