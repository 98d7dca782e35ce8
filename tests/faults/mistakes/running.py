"""Makes wrong calls on live ranks and reports what became of each."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from allocations import Allocations
from faults.mistakes import all_wrong_calls
from faults.mistakes.watching import Watched
from faults.mistakes.wrong_call import CallSite, WrongCall
from harness import run_ranks

__all__ = ["MESSAGE_BYTES", "CallResult", "defects", "outcomes"]

# What ranks may need for a moment to tell each other of an error. Every tensor of the calls' models is larger.
MESSAGE_BYTES = 4096
# All calls take some 15 s on idle cores.
_TIMEOUT_SECONDS = 600.0
_REFUSED_COMMAND = "exit code 2"
_WIDE_TERMINAL = {"COLUMNS": "400"}
# What differs from machine to machine, from day to day, or from device to device.
_VARYING = (
    (r"\b0x[0-9a-f]{6,}", "<address>"),
    (r"transformers \d+\.\d+\.\d+\S*(?= )", "transformers <version>"),
    # On the simulated device.
    (r"\bcuda:\d+", "cpu"),
    (r"(?<=choose one of gloo, )nccl, ", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What a wrong call did on one rank.

    Attributes:
        name: Of the call.
        refusal: The class of the error that there should be.
        error_type: Class of the error, or "exit code 2" of a command; None: there was none.
        message: Its text, without what differs from machine to machine.
        changes: What is not as it was, in words.
        kept_bytes: What tensors take more than before.
        peak_bytes: What they took more meanwhile.
    """

    name: str
    refusal: str
    error_type: str | None
    message: str
    changes: tuple[str, ...]
    kept_bytes: int = 0
    peak_bytes: int = 0


def outcomes(directory: Path) -> dict[str, list[CallResult]]:
    """Makes all wrong calls; returns for each what happened on each rank.

    Args:
        directory: An empty one for the ranks to work in.
    """
    found: dict[str, list[CallResult]] = {}
    for world_size in (1, 2):
        place = directory / f"ranks-{world_size}"
        place.mkdir()
        by_rank = run_ranks(make_calls, world_size, str(place), world_size, timeout=_TIMEOUT_SECONDS)
        for ranks in zip(*by_rank, strict=True):
            if ranks[0].name in found:
                raise ValueError(f"two wrong calls are named {ranks[0].name!r}: give each a name of its own")
            found[ranks[0].name] = list(ranks)
    return found


def defects(ranks: Sequence[CallResult]) -> list[str]:
    """Returns what is wrong with how a wrong call was refused on the ranks, in words."""
    found = []
    for rank, outcome in enumerate(ranks):
        if outcome.error_type not in (outcome.refusal, _REFUSED_COMMAND):
            found.append(f"rank {rank}: {outcome.error_type or 'no error'}: {outcome.message}")
        found += [f"rank {rank}: {change}" for change in outcome.changes]
        if outcome.kept_bytes:
            found.append(f"rank {rank}: {outcome.kept_bytes} bytes of tensors are left")
        if outcome.peak_bytes > MESSAGE_BYTES:
            found.append(f"rank {rank}: {outcome.peak_bytes} bytes of tensors were allocated")
    said = _without_messenger(ranks[0].message)
    found += [f"rank {rank} says: {one.message}" for rank, one in enumerate(ranks) if not one.message.endswith(said)]
    return found


def _without_messenger(message: str) -> str:
    """Returns an error's own text, where another rank than the one that was wrong said it."""
    return re.sub(r"^rank \d+ failed, so rank \d+ stops too: ", "", message)


def make_calls(directory: str, world_size: int) -> list[CallResult]:
    """Makes the wrong calls of this number of ranks one after the other, on a rank."""
    calls = all_wrong_calls(world_size)
    place = CallSite(rank=dist.get_rank(), directory=Path(directory))
    if world_size == 1:
        dist.destroy_process_group()  # as before a launch
    os.environ.update(_WIDE_TERMINAL)
    os.chdir(directory)
    _make(calls[0], place, Allocations(), is_watched=False)  # what a process allocates once and for all
    with Allocations() as allocations:
        made = [_make(call, place, allocations) for call in calls]
    return [_weighed(one, allocations) for one in made]


def _make(call: WrongCall, place: CallSite, allocations: Allocations, *, is_watched: bool = True) -> CallResult:
    print(call.name, flush=True)  # so that the output of a rank that hangs ends with where
    with _captured() as printed, _kept_environment():
        prepared = call.prepare(place)
        watched = Watched(prepared, place.directory)
        gc.collect()
        if is_watched:
            allocations.mark(f"{call.name} begins")
        error_type, message = _error_of(prepared, printed)
        if is_watched:
            allocations.mark(f"{call.name} ends")
        changes = watched.changes()
    for pattern, shown in ((re.escape(str(place.directory)), "<path>"), *_VARYING):
        message = re.sub(pattern, shown, message)
    return CallResult(
        name=call.name, refusal=call.refusal, error_type=error_type, message=message, changes=tuple(changes)
    )


def _error_of(prepared: Callable[[], Any], printed: io.TextIOWrapper) -> tuple[str | None, str]:
    """Returns class and text of the error; of a command, what it said last before exit code 2."""
    try:
        returned = prepared()
    except SystemExit as error:
        return f"exit code {error.code}", _last_line(printed)
    except Exception as error:
        return type(error).__name__, str(error)
    if returned == 2 and _last_line(printed):
        return _REFUSED_COMMAND, _last_line(printed)
    return None, f"it returned {returned!r:.100}"


def _last_line(printed: io.TextIOWrapper) -> str:
    printed.flush()
    lines = printed.buffer.getvalue().decode().strip().splitlines()  # type: ignore[attr-defined]
    return lines[-1] if lines else ""


def _weighed(made: CallResult, allocations: Allocations) -> CallResult:
    begin, end = f"{made.name} begins", f"{made.name} ends"
    before = allocations.at(begin)
    return replace(made, kept_bytes=allocations.at(end) - before, peak_bytes=allocations.peak(begin, end) - before)


@contextlib.contextmanager
def _captured() -> Iterator[io.TextIOWrapper]:
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        yield printed


@contextlib.contextmanager
def _kept_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
