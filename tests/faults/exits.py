"""Ends short programs of two ranks again and again and counts how: each runs to the interpreter's own end.

    python tests/faults/exits.py async_save,error 250

A process that has imported everything forks the ranks, so that one more end takes little more than the end itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import DistError, HashStore

import booster
from booster import Booster, Monitor
from booster.fault_tolerance import heartbeat
from booster.fault_tolerance.store import call_with_timeout
from booster.plugins import LowLevelZeroPlugin

NUM_RANKS = 2
ENDS = {  # how a program ends, and with which exit code
    "launch_only": 0,
    "training": 0,
    "saves": 0,
    "async_save": 0,
    "monitor": 0,
    "sys_exit": 3,
    "error": 1,
    "user_destroys": 0,
    "late_answer": 0,
}


def end_programs(end: str, num_programs: int, under: Path) -> Counter[str]:
    """Returns how many ranks ended as they should ("well"), and how the others did.

    Args:
        end: One of `ENDS`.
        num_programs: Of `NUM_RANKS` ranks each.
        under: A directory for their files.
    """
    counts: Counter[str] = Counter()
    for number in range(num_programs):
        folder = under / f"{end}-{number}"
        folder.mkdir()
        port = _free_port()
        ranks = [_forked(end, rank, port, folder) for rank in range(NUM_RANKS)]
        for rank, process_id in enumerate(ranks):
            _, status = os.waitpid(process_id, 0)
            counts[_verdict(status, ENDS[end], (folder / f"stderr-{rank}").read_text())] += 1
    return counts


def _verdict(status: int, expected: int, said: str) -> str:
    last = said.strip().splitlines()[-1:] or [""]
    if os.WIFSIGNALED(status):
        return f"{signal.Signals(os.WTERMSIG(status)).name}: {last[0]}"
    code = os.waitstatus_to_exitcode(status)
    if code != expected:
        return f"exit code {code}: {last[0]}"
    return "terminate called" if "terminate called" in said or "Fatal Python error" in said else "well"


def _forked(end: str, rank: int, port: int, folder: Path) -> int:
    process_id = os.fork()
    if process_id == 0:
        stderr = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(stderr, 2)
        raise _RankEndsError(end, rank, port, folder)
    return process_id


class _RankEndsError(BaseException):
    """Takes a forked rank out of the loop, to the end of the script."""

    def __init__(self, end: str, rank: int, port: int, folder: Path) -> None:
        super().__init__()
        self.arguments = end, rank, port, folder


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_rank(end: str, rank: int, port: int, folder: Path) -> None:
    """Does what a short program of a user's does; the interpreter ends after it."""
    heartbeat._INTERVAL_SECONDS = 0.001  # the heartbeat thread is in the store most of the time
    booster.launch(rank, NUM_RANKS, "127.0.0.1", port, "gloo", 0, verbose=False)
    if end == "launch_only":
        return
    trainer = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
    model = nn.Linear(16, 16)
    model, optimizer, *_ = trainer.boost(model, torch.optim.AdamW(model.parameters()))
    if end == "monitor":
        Monitor(model, optimizer, log=folder / "run.jsonl", hang_seconds=0.2).__enter__()
    trainer.backward(model(torch.ones(2, 16)).sum(), optimizer)
    optimizer.step()
    if end in ("saves", "async_save"):
        trainer.save(folder / "checkpoint", model, optimizer, use_async=end == "async_save")
    if end == "user_destroys":
        torch.distributed.destroy_process_group()
    if end == "late_answer":  # from a store that is busy: it comes while the interpreter ends
        for milliseconds in range(100, 400, 20):
            with suppress(DistError):
                call_with_timeout(lambda: HashStore().wait(["never"], timedelta(milliseconds=milliseconds)), 0.001)  # noqa: B023
    if end == "sys_exit":
        sys.exit(3)
    if end == "error":
        raise ValueError("an error of the program's own")


if __name__ == "__main__":
    directory = tempfile.mkdtemp()
    try:
        counts = {end: end_programs(end, int(sys.argv[2]), Path(directory)) for end in sys.argv[1].split(",")}
        print(json.dumps(counts))
        shutil.rmtree(directory)
    except _RankEndsError as forked:
        arguments = forked.arguments
    else:
        sys.exit()
    run_rank(*arguments)
