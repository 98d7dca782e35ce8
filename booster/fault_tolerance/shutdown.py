"""Shutdown of a rank: report the exit to the others, and fail if they fail because of it."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from types import FrameType, TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from booster.errors import RankFailedError

from .collective_errors import abort_groups
from .failure_diagnosis import report_failure
from .heartbeat import (
    ENDED,
    FAILED,
    STALE_SECONDS,
    acknowledge_exits,
    acknowledged_ranks,
    ended_processes,
    exit_statuses,
    read_heartbeats,
    stop_heartbeat,
)

# Note [Shutdown]
# A program that finishes while other ranks wait for this one looks successful from here: its batches were used up, say,
# and theirs were not. So at its end a rank reports its exit and waits until all others have reported theirs. Ranks that
# wait for it learn the cause at once (see Note [Heartbeats]), fail, and report that; then this rank exits with an
# error, too. A rank that is gone, or whose heartbeats have stopped, is not waited for. If rank 0 serves the store it
# stays until all waiting ranks have read the exit states.
# A program that ends by an error reports it and aborts its groups: peers that wait for it fail at once, with the
# reason.

EXIT_CODE = 1  # of a rank whose program finished while others failed, or which waits for a lost one
_PAUSE_SECONDS = 0.02
_CHECK_SECONDS = 1.0
_READING_SECONDS = 5.0
_REPORT_SECONDS = 15.0  # beyond the longest timeout: for the diagnosis and the exit of a rank that waited


def shutdown_barrier(error: BaseException | None, timeout_seconds: float) -> None:
    """Report this rank's exit and wait for the other ranks; the last call of a program.

    Does not return if other ranks failed because of this one: the process exits with `EXIT_CODE`.

    Args:
        error: Error that ended the program, None if it finished.
        timeout_seconds: Longest timeout of a wait for another rank. Ranks that continue are waited for slightly longer.
    """
    if error is not None:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, RankFailedError):
            report_failure(text)
        stop_heartbeat(FAILED, text)
        with suppress(RuntimeError):  # torch has destroyed a group already
            abort_groups(list(_world.pg_map), text)
        return
    stop_heartbeat(ENDED)
    failed = _wait_for_exits(timeout_seconds)
    if failed:
        _exit_after_peer_failure(failed)


def exit_for_lost_ranks(text: str, thread_id: int) -> None:
    """End this process with a `RankFailedError` that cannot be raised: a thread waits on an accelerator. Never returns.

    The error is printed with the stack of that thread, and written into the error file of torch's elastic agent.

    Args:
        text: Text of the error.
        thread_id: Identifier of the thread that waits.
    """
    error = RankFailedError(text)
    try:
        raise error.with_traceback(_traceback_of(sys._current_frames().get(thread_id)))
    except RankFailedError:
        sys.excepthook(type(error), error, error.__traceback__)
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):
            get_error_handler().record_exception(error)
        stop_heartbeat(FAILED, f"{type(error).__name__}: {text}")
        if dist.is_initialized():
            with suppress(RuntimeError):  # the process that serves the store has ended
                _wait_for_acknowledgements({rank for rank, (state, _) in exit_statuses().items() if state == ENDED})
    finally:
        _exit_at_once()


def _traceback_of(frame: FrameType | None) -> TracebackType | None:
    """Return the stack that ends in a frame as the traceback of an error that is raised there."""
    trace = None
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return trace


def _wait_for_exits(timeout_seconds: float) -> dict[int, str]:
    """Return the errors of failed ranks, once all have ended."""
    others = set(range(dist.get_world_size())) - {dist.get_rank()}
    deadline = time.monotonic() + timeout_seconds + _REPORT_SECONDS
    sequences: dict[int, tuple[int, float]] = {}
    next_look = time.monotonic() + _CHECK_SECONDS
    with suppress(RuntimeError):  # the process that serves the store has ended, which is an exit, too
        while time.monotonic() < deadline:
            exits = exit_statuses()
            running = others.difference(exits)
            if not running:
                failed = {rank: text for rank, (state, text) in exits.items() if state == FAILED}
                _wait_for_acknowledgements(set(exits).difference(failed))
                return failed
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _CHECK_SECONDS
                if running <= _stale_ranks(running, sequences):
                    return {}
            time.sleep(_PAUSE_SECONDS)
    return {}


def _wait_for_acknowledgements(ranks: set[int]) -> None:
    """Record that this rank has read all exit states; rank 0 waits until all of these ranks have."""
    deadline = time.monotonic() + _READING_SECONDS
    with suppress(RuntimeError):  # the process that serves the store has ended, as this one is about to
        acknowledged = acknowledge_exits()
        while dist.get_rank() == 0 and not acknowledged.issuperset(ranks) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            acknowledged = acknowledged_ranks()


def _stale_ranks(ranks: set[int], sequences: dict[int, tuple[int, float]]) -> set[int]:
    """Return the ranks whose processes are gone, or which have written no heartbeat for STALE_SECONDS.

    Args:
        ranks: Global ranks that are asked for.
        sequences: Last sequence number of each rank's heartbeat, and when it was first read; updated.
    """
    heartbeats, now = read_heartbeats(ranks), time.monotonic()
    for rank in ranks:
        sequence = heartbeats[rank].sequence if rank in heartbeats else 0
        if rank not in sequences or sequences[rank][0] != sequence:
            sequences[rank] = sequence, now
    stale = {rank for rank in ranks if now - sequences[rank][1] > STALE_SECONDS}
    return stale.union(ended_processes(heartbeats))


def _exit_after_peer_failure(failed: dict[int, str]) -> None:
    rank, text = min(failed.items())
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    sys.stderr.write(
        f"rank {dist.get_rank()}'s program finished, but rank {rank}{others} failed, so this rank exits with code"
        f" {EXIT_CODE}, too. rank {rank} reported: {text}\n"
    )
    _exit_at_once()


def _exit_at_once() -> None:
    """Exit without atexit functions and destructors: an error in an atexit function would not change the exit code."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the script, or by its reader
            stream.flush()
    os._exit(EXIT_CODE)
