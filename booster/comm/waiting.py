"""An error about a lost connection becomes one that names the ranks that are missing, and where the others are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from textwrap import shorten

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _world

from booster.comm.inquiry import Inquiry, Place, noted_failures, write_note, write_that_left
from booster.comm.shared_memory import abort_shared_memory
from booster.errors import RankFailedError
from booster.kernels.shared_memory import SharedMemoryError

__all__ = ["REPORT_SECONDS", "Place", "break_off", "failures_named", "hang_up", "note_failure"]

# Note [Missing ranks]
# A connection that breaks doesn't tell whose fault it was: one rank waits in vain for another, gives up, and thereby
# breaks its connections to all others. And in a ring only the neighbours of a dead rank see it at all. So each rank
# that fails writes into the store, which isn't part of the group, where it stands; closes its own connections of the
# group and ends its shared memory, which wakes those who wait for it; and waits until the others have written, too. Who
# writes nothing in REPORT_SECONDS is missing: it has ended, it hangs, or it is busy elsewhere. The first that has
# counted writes the verdict (by compare_set, so once) and all obey it, also a rank that was late and finds its
# connections closed: it reads that it was given up. Of a message between two ranks the verdict is about those two.
# Where shared memory has shown that a rank's process has ended there is nothing to wait for: that one is missing. The
# same holds of processes of this machine that are gone, and of a rank that wrote that its program has ended.
# What is known of the missing ones, see Note [Signs].
# The keys belong to the group and stay: gloo never mends a group, and what is called on it later fails the same way.
# Nobody waits inside of the store: see Note [Error barrier].
# A rank that fails for a reason of its own can spare the others the wait: `note_failure` writes the reason, `hang_up`
# writes that it has left the groups, and closes its connections. Notes belong to the world and outlive a failure that
# the program survives, so a note alone does not end an inquiry; that a rank has left the group does.
# With TORCH_DISTRIBUTED_DEBUG=DETAIL a barrier of torch's own goes ahead of each collective, over connections that stay
# open: there a rank that waits in it may count as missing.

REPORT_SECONDS = 3.0
_NEVER_SENT = 2**24 - 1  # a tag
_AT_ONCE = timedelta(milliseconds=1)
_MAX_NOTE = 400  # characters of what a rank says about its failure
_MAX_TEXT = 300

# What gloo, nccl, torch's debug mode and our shared memory write when a rank is lost or late. Other errors are about
# the call itself.
_LOST = re.compile(
    r"timed? ?out|connection|closed|reset by peer|broken pipe|socket|monitoredBarrier|remote (process|error)|abort",
    re.IGNORECASE,
)

# What torch's gloo writes around its errors.
_SOURCE_FILE = re.compile(r"^\[\S+:\d+\] ")
_ADVICE = re.compile(r"This is typically caused by|GLHF!")


@contextmanager
def failures_named(place: Place, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turns an error about a lost or late rank into `RankFailedError`; every blocking wait goes through it.

    Raises:
        RankFailedError: With the operation, the ranks that are missing, what is known of them, where the others are,
            and the error of torch or of shared memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise RankFailedError(_explanation(place, group or _get_default_group(), error)) from error


def _explanation(place: Place, group: dist.ProcessGroup, error: RuntimeError) -> str:
    head, tail = f"rank {dist.get_rank()} could not finish {place}", _witness(error, group)
    try:
        inquiry = Inquiry(place, group)
        head = f"rank {dist.get_rank()} could not finish {inquiry.where()}"
        _close_connections(group)
        inquiry.report()
        finding = inquiry.finding(REPORT_SECONDS, _known_to_have_ended(error, group))
        return f"{head}: {finding}" if noted_failures() else f"{head}: {finding}{tail}"
    except dist.DistError as failure:
        return (
            f"{head}, and the store of torch.distributed is gone too ({_first_line(failure)}): the process that serves"
            f" it (rank 0 or the launcher) has ended or is stopped, see its log{tail}"
        )


def _witness(error: RuntimeError, group: dist.ProcessGroup) -> str:
    """Returns what the transport says, in parentheses; nothing where this rank ended it itself: see `break_off`."""
    if isinstance(error, SharedMemoryError):
        return "" if error.is_own_abort else f" (shared memory says: {_first_line(error)})"
    is_of_gloo = "gloo" in str(dist.get_backend(group)) and "nccl" not in str(error).lower()
    return f" ({'gloo' if is_of_gloo else 'torch'} says: {_first_line(error)})"


def _known_to_have_ended(error: RuntimeError, group: dist.ProcessGroup) -> list[int]:
    if not isinstance(error, SharedMemoryError) or error.ended_rank is None:
        return []
    return [dist.get_global_rank(group, error.ended_rank)]


def note_failure(text: str) -> None:
    """Tells the other ranks why this one failed: their errors about lost ranks will say so.

    To be called before `hang_up`, for a failure of this rank's own, not for a `RankFailedError`. No communication: it
    writes into the store of the world. Where that is gone, or there is no world, nothing happens.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):  # the process that serves the store has ended
            write_note(shorten(text, _MAX_NOTE, placeholder=" ..."))


def hang_up(groups: Sequence[dist.ProcessGroup | None], reason: str = "") -> None:
    """Ends what this rank shares in these groups, for good: who waits for it there, or will, fails at once.

    With gloo and through shared memory; ranks that wait by NCCL find it by its own timeout. Returns at once; nothing
    raises where the connections or the store are gone already. No other thread may start an operation there meanwhile.

    Args:
        groups: None: the world. Those that this rank is not in are left out.
        reason: What the others are told where no rank has noted a failure of its own: whom this one misses, say.
    """
    chosen = [group or _get_default_group() for group in groups]
    mine = [group for group in chosen if dist.get_rank(group) >= 0]
    for group in mine:
        with suppress(RuntimeError):  # the process that serves the store has ended
            write_that_left(group, shorten(reason, _MAX_NOTE, placeholder=" ..."))
    for group in mine:
        _close_connections(group)


def break_off(ranks: Collection[int]) -> None:
    """Ends what this rank shares in the groups of these world ranks, who won't come any more: its waits there fail.

    Any thread may call it. The ranks must have given their part of everything that can still be finished.
    """
    for group in list(_world.pg_map):
        with suppress(ValueError, KeyError):  # the main thread has destroyed it meanwhile
            if dist.get_rank(group) >= 0 and not set(ranks).isdisjoint(dist.get_process_group_ranks(group)):
                _close_connections(group)


def _close_connections(group: dist.ProcessGroup) -> None:
    """Ends this rank's shared memory, and closes its connections of a gloo group.

    Gloo closes them itself where a message does not come in time.
    """
    abort_shared_memory(group)
    if "gloo" not in str(dist.get_backend(group)):
        return
    for other in dist.get_process_group_ranks(group):
        if other != dist.get_rank():
            with suppress(RuntimeError):  # the timeout that is wanted, or a connection that is closed already
                work = dist.irecv(torch.empty(1), src=other, group=group, tag=_NEVER_SENT)
                if work is not None:
                    work.wait(_AT_ONCE)


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's text, without the source file before it and the advice for all cases."""
    lines = str(error).strip().splitlines()
    text = _ADVICE.split(_SOURCE_FILE.sub("", lines[0]), maxsplit=1)[0].rstrip(" .") if lines else ""
    return text[:_MAX_TEXT] or type(error).__name__
