"""The end of a rank's program: it says so to the others, and does not end well where others could not go on."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from booster.comm.signs import (
    ENDED,
    FAILED,
    end_signs,
    ended_processes,
    ends_of_ranks,
    ranks_that_know_ends,
    read_signs,
    say_that_ends_are_known,
)
from booster.comm.waiting import hang_up, note_failure
from booster.errors import RankFailedError

__all__ = ["EXIT_CODE", "say_farewell"]

# Note [Farewell]
# A program that ends while other ranks still wait for this one looks well from here: its batches were used up, say, and
# theirs were not. So at its end a rank writes that it has come there, and stays until all others have written the same.
# They learn from it at once what is wrong (see Note [Signs]), fail, and write that; and this rank ends with an error,
# too. Nobody stays for a rank that is gone, or that gives no more signs. Where rank 0 serves the store it stays until
# nobody needs it: until all that wait have read how the others ended.
# A program that ends by an error of its own says why, and hangs up: who waits for it fails at once, with the reason.

EXIT_CODE = 1  # of a rank whose program came to its end while others could not
_PAUSE_SECONDS = 0.02
_SECONDS_BETWEEN_LOOKS = 1.0
_SILENCE_SECONDS = 30.0
_READING_SECONDS = 5.0
_REPORT_SECONDS = 15.0  # beyond the longest wait: until who has waited in vain has found out for whom, and has ended


def say_farewell(error: BaseException | None, limit_seconds: float) -> None:
    """Ends this rank's part in the world; the last that a program does. Does not return where others failed for it.

    Args:
        error: What ended the program; None: it came to its end.
        limit_seconds: The longest wait for another rank. So long, and somewhat longer, this one stays for ranks that go
            on.
    """
    if error is not None:
        _leave_after(error)
        return
    end_signs(ENDED)
    failed = _failures_of_others(limit_seconds)
    if failed:
        _end_with_them(failed)


def _leave_after(error: BaseException) -> None:
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, RankFailedError):
        note_failure(text)
    end_signs(FAILED, text)
    with suppress(RuntimeError):  # torch has taken a group apart already
        hang_up(list(_world.pg_map), text)


def _failures_of_others(limit_seconds: float) -> dict[int, str]:
    """Returns why other ranks failed, once all have ended."""
    others = set(range(dist.get_world_size())) - {dist.get_rank()}
    deadline = time.monotonic() + limit_seconds + _REPORT_SECONDS
    silence = _Silence()
    next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
    with suppress(RuntimeError):  # the process that serves the store has ended: it is an end, too
        while time.monotonic() < deadline:
            ends = ends_of_ranks()
            going_on = others.difference(ends)
            if not going_on:
                failed = {rank: text for rank, (state, text) in ends.items() if state == FAILED}
                _stay_until_known(set(ends).difference(failed))
                return failed
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
                if going_on <= silence.of(going_on):
                    return {}
            time.sleep(_PAUSE_SECONDS)
    return {}


def _stay_until_known(ranks: set[int]) -> None:
    """Says that this rank knows how all ended; on rank 0 returns once all of these ranks have said so."""
    deadline = time.monotonic() + _READING_SECONDS
    with suppress(RuntimeError):  # the process that serves the store has ended, as this one is about to
        known = say_that_ends_are_known()
        while dist.get_rank() == 0 and not known.issuperset(ranks) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            known = ranks_that_know_ends()


class _Silence:
    """Which ranks have given no new sign for long."""

    def __init__(self) -> None:
        self._beats: dict[int, tuple[int, float]] = {}  # the last one, and when it was new

    def of(self, ranks: set[int]) -> set[int]:
        """Returns those among the ranks whose processes are gone, or that say nothing any more."""
        signs, now = read_signs(ranks), time.monotonic()
        for rank in ranks:
            beat = signs[rank].beat if rank in signs else 0
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
        silent = {rank for rank in ranks if now - self._beats[rank][1] > _SILENCE_SECONDS}
        return silent.union(ended_processes(signs))


def _end_with_them(failed: dict[int, str]) -> None:
    rank, text = min(failed.items())
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    sys.stderr.write(
        f"rank {dist.get_rank()}'s program came to its end, but rank {rank}{others} failed, so this rank ends with exit"
        f" code {EXIT_CODE}, too. rank {rank} said: {text}\n"
    )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the script, or its reader is gone
            stream.flush()
    os._exit(EXIT_CODE)  # what atexit functions raise does not change the exit code
