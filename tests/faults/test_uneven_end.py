"""Ranks whose own iterators end before others': an error on all ranks that names the short ones, and never a hang."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
from dataclasses import dataclass

import pytest
from faults.loss_program import PLUGINS
from faults.uneven_program import AFTER_THE_LOOP, TRAINING_SECONDS, UnevenCase, run_rank
from harness.forkserver import preload, start_context

preload("booster", "booster.plugins", "faults.uneven_program")

END_SECONDS = 10.0  # from the end of the shortest loop until all ranks have ended
BUSY_SECONDS = 15.0  # on top of that, where other programs want the processors
_START_SECONDS = 90.0  # until a loop has ended; on a busy machine
_STACK_SECONDS = 5.0

FAST_CASES = [
    UnevenCase(plugin="torch_ddp", lengths=(4, 3), after="end"),
    UnevenCase(plugin="torch_ddp", lengths=(3, 4, 3), after="wait"),
    UnevenCase(plugin="torch_ddp", lengths=(0, 2), after="boost"),
    UnevenCase(plugin="torch_ddp", lengths=(2, 3), after="gather", shares_memory=False),
    UnevenCase(plugin="low_level_zero", lengths=(2, 3), after="save"),
    UnevenCase(plugin="low_level_zero", lengths=(3, 3, 1), after="end"),
    UnevenCase(plugin="gemini", lengths=(3, 2), after="gather"),
    UnevenCase(plugin="gemini", lengths=(2, 4), after="end", shares_memory=False),
    UnevenCase(plugin="torch_fsdp", lengths=(4, 2), after="save"),
    UnevenCase(plugin="torch_fsdp", lengths=(2, 3, 3), after="boost"),
    UnevenCase(plugin="hybrid_parallel", lengths=(3, 2), after="end"),
    UnevenCase(plugin="hybrid_parallel", lengths=(3, 3, 2, 2), after="gather"),
]
SLOW_CASES = [
    UnevenCase(plugin=plugin, lengths=lengths, after=after, shares_memory=shares_memory)
    for plugin in PLUGINS
    for after in AFTER_THE_LOOP
    for lengths, shares_memory in (((4, 2), True), ((1, 2), False), ((2, 3, 3, 2), True))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        code: Exit code; None: it was still there when time was up.
        error: Class and text of the error that ended it; empty: none.
        num_steps: How many batches its loop had; None: it did not come to the loop's end.
        output: What it wrote.
    """

    code: int | None
    error: tuple[str, str]
    num_steps: int | None
    output: str


def _run(case, directory):
    """Returns how the ranks ended, and how long after the end of the first loop the last of them did."""
    context, port = start_context(), _free_port()
    ranks = range(case.world_size)
    processes = [
        context.Process(target=run_rank, args=(case, rank, port, str(directory)), daemon=True) for rank in ranks
    ]
    try:
        for process in processes:
            process.start()
        seconds = _wait_for_end(processes, directory)
        ends = [_end_of(process, rank, directory) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return ends, seconds


def _wait_for_end(processes, directory):
    began = time.monotonic()
    while True:
        now, first_end = time.monotonic(), _first_loop_end(directory)
        alive = [process for process in processes if process.is_alive()]
        deadline = began + _START_SECONDS if first_end is None else first_end + END_SECONDS + BUSY_SECONDS
        if not alive:
            return now - (first_end or began)
        if now > deadline:
            break
        alive[0].join(0.1)
    for process in alive:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(process.pid, signal.SIGABRT)  # writes its stacks
        process.join(_STACK_SECONDS)
    return now - (first_end or began)


def _first_loop_end(directory):
    texts = [path.read_text() for path in directory.glob("loop-ended-*")]
    return min((float(text.split()[0]) for text in texts if text), default=None)


def _end_of(process, rank, directory):
    error, loop, output = (directory / f"{name}-{rank}" for name in ("error", "loop-ended", "output"))
    return RankEnd(
        code=process.exitcode,
        error=tuple(json.loads(error.read_text())) if error.exists() else ("", ""),
        num_steps=int(loop.read_text().split()[1]) if loop.exists() else None,
        output=output.read_text(errors="replace") if output.exists() else "",
    )


def _free_port():
    """Returns a port below those that the system gives to connections, of which one might take it meanwhile."""
    for port in random.sample(range(15000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports is free")


def _report(ends, seconds):
    return f"after {seconds:.1f} s\n" + "\n".join(
        f"rank {rank}: exit code {end.code}, {end.num_steps} steps, {': '.join(end.error)}\n{end.output[-1500:]}"
        for rank, end in enumerate(ends)
    )


def _all_cases():
    return [*FAST_CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES if case not in FAST_CASES)]


@pytest.mark.parametrize("case", _all_cases(), ids=str)
@pytest.mark.slow
def test_short_ranks_are_named_on_all_ranks(case, tmp_path):
    ends, seconds = _run(case, tmp_path)
    report = _report(ends, seconds)
    assert all(end.code not in (None, 0) and end.code > 0 for end in ends), report  # a signal has no exit code
    assert seconds < END_SECONDS + BUSY_SECONDS, report
    for rank, end in enumerate(ends):
        is_short = rank in case.short_ranks
        assert (end.num_steps is not None) == is_short, report
        if is_short and "'s program finished, but rank" in end.output:
            continue  # what it did after its loop needed no other rank: it ends with the others' failure
        assert end.error[0] in ("RankFailedError", "DesyncError"), report
        assert any(f"rank {short}" in end.error[1] or f", {short}" in end.error[1] for short in case.short_ranks), (
            report
        )


@pytest.mark.slow
@pytest.mark.parametrize("after", ["end", pytest.param("save", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plugin", ["torch_ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in PLUGINS)])
def test_joined_ranks_end_well(plugin, after, tmp_path):
    ends, seconds = _run(UnevenCase(plugin=plugin, lengths=(2, 4), after=after, joins=True), tmp_path)
    report = _report(ends, seconds)
    assert [(end.code, end.num_steps, end.error[0]) for end in ends] == [(0, 2, "")] * 2, report
    assert "join_uneven() ends after 2 batches on each rank: rank 0 had no more" in ends[0].output
    assert seconds < TRAINING_SECONDS + BUSY_SECONDS, report
