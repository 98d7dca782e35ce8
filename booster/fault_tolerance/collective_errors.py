"""Errors of collectives: a lost connection becomes an error that names the missing ranks and the others' progress."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _world

from booster.errors import RankFailedError, first_line
from booster.kernels.shared_memory import SharedMemoryError

from .failure_diagnosis import CollectiveId, FailureDiagnosis, report_group_abort, reported_failures

# Note [Missing ranks]
# A broken connection does not identify the rank that caused it: one rank's wait for another times out, which breaks its
# connections to all others, and in a ring only the neighbours of a dead rank notice anything. So each rank that fails
# 1. writes its operation and progress into the store, which is not part of the group; 2. closes its connections of the
# group and aborts its shared memory, which wakes its peers; 3. waits for the reports of the others. A rank without a
# report after REPORT_SECONDS is missing: it has ended, hangs, or runs something else. The first rank to count writes
# the list of missing ranks (by compare_set, so once) and all use it. A late rank finds its connections closed, and
# reads that it was counted as missing. For a message between two ranks the list is about those two.
# Nothing is waited for where shared memory reported an ended process, a process of this host is gone, or a rank
# reported that its program has ended. For the state of missing ranks see Note [Heartbeats].
# The keys belong to the group and stay: a gloo group cannot be repaired, and later calls on it fail the same way. No
# rank waits inside of the store: see Note [Error barrier].
# A rank that fails for a local reason spares the others the wait: `report_failure` reports the reason, `abort_groups`
# reports that it has left the groups and closes its connections. Reported failures belong to the world and outlive a
# failure that the program survives, so a report alone does not end a diagnosis; leaving the group does.
# With TORCH_DISTRIBUTED_DEBUG=DETAIL torch puts a barrier before each collective, over connections that stay open: a
# rank that waits in it may count as missing.

REPORT_SECONDS = 3.0
_NEVER_SENT = 2**24 - 1  # a tag
_AT_ONCE = timedelta(milliseconds=1)
_MAX_TEXT = 300

# Errors of gloo, nccl, torch's debug mode and our shared memory when a rank is lost or late. Others are about the call.
_CONNECTION_LOST = re.compile(
    r"timed? ?out|connection|closed|reset by peer|broken pipe|socket|monitoredBarrier|remote (process|error)|abort",
    re.IGNORECASE,
)

# Text that torch's gloo puts around its errors.
_SOURCE_FILE = re.compile(r"^\[\S+:\d+\] ")
_ADVICE = re.compile(r"This is typically caused by|GLHF!")

# Called with a group whose collectives this rank aborts: those that do not run through the group's backend are aborted
# by the function that their implementation adds here.
abort_callbacks: list[Callable[[dist.ProcessGroup], None]] = []


@contextmanager
def translate_errors(collective: CollectiveId, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Translate an error about a lost or late rank to `RankFailedError`. Every blocking wait uses it.

    Raises:
        RankFailedError: The operation, the missing ranks and their last state, the progress of the others, and the
            error of torch or of shared memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not _CONNECTION_LOST.search(str(error)):
            raise
        raise RankFailedError(_explain(collective, group or _get_default_group(), error)) from error


def _explain(collective: CollectiveId, group: dist.ProcessGroup, error: RuntimeError) -> str:
    head, tail = f"rank {dist.get_rank()} could not finish {collective}", _backend_message(error, group)
    try:
        diagnosis = FailureDiagnosis(collective, group)
        head = f"rank {dist.get_rank()} could not finish {diagnosis.position}"
        _close_connections(group)
        ended = error.ended_rank if isinstance(error, SharedMemoryError) else None
        known_to_have_ended = [] if ended is None else [dist.get_global_rank(group, ended)]
        result = diagnosis.diagnose(REPORT_SECONDS, known_to_have_ended)
        return f"{head}: {result}" if reported_failures() else f"{head}: {result}{tail}"
    except dist.DistError as failure:
        return (
            f"{head}, and the store of torch.distributed is gone too ({_reason(failure)}): the process that serves"
            f" it (rank 0 or the launcher) has ended or is stopped, see its log{tail}"
        )


def _backend_message(error: RuntimeError, group: dist.ProcessGroup) -> str:
    """Return the transport's error in parentheses, or "" where this rank aborted the wait itself; see `abort_waits`."""
    if isinstance(error, SharedMemoryError):
        return "" if error.is_own_abort else f" (shared memory reports: {_reason(error)})"
    is_of_gloo = "gloo" in str(dist.get_backend(group)) and "nccl" not in str(error).lower()
    return f" ({'gloo' if is_of_gloo else 'torch'} reports: {_reason(error)})"


def abort_groups(groups: Sequence[dist.ProcessGroup | None], reason: str = "") -> None:
    """Abort this rank's connections in `groups`. Peers waiting on it fail immediately.

    Works with gloo and shared memory; peers that wait by NCCL fail at its timeout. Returns at once. Nothing is raised
    if the connections or the store are gone. No other thread may start an operation on the groups meanwhile.

    Args:
        groups: Process groups, None for the world. Groups without this rank are skipped.
        reason: Text for the peers' errors, used where no rank has reported a failure.
    """
    chosen = [group or _get_default_group() for group in groups]
    mine = [group for group in chosen if dist.get_rank(group) >= 0]
    for group in mine:
        report_group_abort(group, reason)
    for group in mine:
        _close_connections(group)


def abort_all_groups(reason: str = "") -> None:
    """Abort this rank's connections in all of its groups; see `abort_groups`."""
    if dist.is_initialized():
        abort_groups(list(_world.pg_map), reason)


def abort_waits(ranks: Collection[int]) -> None:
    """Abort this rank's waits in all groups of these global ranks, whose programs have ended.

    Any thread may call it. The ranks must have contributed to everything that can still complete.
    """
    for group in list(_world.pg_map):
        with suppress(ValueError, KeyError):  # the main thread has destroyed the group meanwhile
            if dist.get_rank(group) >= 0 and not set(ranks).isdisjoint(dist.get_process_group_ranks(group)):
                _close_connections(group)


def _close_connections(group: dist.ProcessGroup) -> None:
    """Call the abort callbacks, and close this rank's connections of a gloo group.

    Gloo closes a connection when a message times out.
    """
    for abort in abort_callbacks:
        abort(group)
    if "gloo" not in str(dist.get_backend(group)):
        return
    for other in dist.get_process_group_ranks(group):
        if other != dist.get_rank():
            with suppress(RuntimeError):  # the intended timeout, or a closed connection
                work = dist.irecv(torch.empty(1), src=other, group=group, tag=_NEVER_SENT)
                if work is not None:
                    work.wait(_AT_ONCE)


def _reason(error: Exception) -> str:
    """Return the first line of an error's text, without gloo's source position and general advice."""
    text = _ADVICE.split(_SOURCE_FILE.sub("", first_line(error)), maxsplit=1)[0].rstrip(" .")
    return text[:_MAX_TEXT] or type(error).__name__
