"""Check of communication: a timed all-reduce between two processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # no __all__ there

from booster.cli.check_report import Finding, Section
from booster.device import device_type, num_devices

__all__ = ["RANK_COMMAND", "communication"]

RANK_COMMAND = (sys.executable, "-m", "booster.cli.check_rank")
_NAME = "all-reduce"
_NUM_RANKS = 2
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 2.0  # for a process to report its error after the other has failed
_LATE_ADVICE = "raise --comm-timeout, or check the load of this machine"
_ADVICE = (
    "check that processes of this machine may connect to localhost; if shared memory failed, set "
    "BOOSTER_SHARED_MEMORY=off"
)


@dataclass(slots=True, kw_only=True)
class _RankProcess:
    """A rank process, its record and its stderr."""

    rank: int
    process: subprocess.Popen[bytes]
    record_path: Path
    stderr_path: Path

    def record(self) -> dict[str, Any]:
        # No record: it is still importing torch, or failed to.
        return json.loads(self.record_path.read_text()) if self.record_path.is_file() else {"step": "starting"}

    def is_running(self) -> bool:
        return self.process.poll() is None

    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def failure_text(self) -> str:
        record, code = self.record(), self.process.returncode
        reason = record.get("error")
        if reason is None:
            lines = self.stderr_path.read_text(errors="replace").split("\n")
            last_line = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            exit_text = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            reason = f"{exit_text} ({last_line})"
        return f"rank {self.rank} failed while {record['step']}: {reason}"


def communication(timeout_seconds: float, command: Sequence[str] = RANK_COMMAND) -> Section:
    """All-reduce a tensor between two processes, and return the backend and the time taken.

    They communicate as two ranks of this machine: by nccl if there are two CUDA devices, else on the CPU.

    Args:
        timeout_seconds: Time limit; processes that still run then are killed and reported.
        command: Command line of each rank.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="booster_check_") as folder:
        try:
            records, problem = _run(Path(folder), timeout_seconds, command)
        except DistError as error:
            records, problem = [], f"can't start a store server at localhost ({error}); {_ADVICE}"
    seconds = round(time.monotonic() - start, 3)
    found = _success(records, seconds) if problem is None else _failure(problem, seconds)
    return Section(title="communication", findings=[found])


def _run(folder: Path, timeout_seconds: float, command: Sequence[str]) -> tuple[list[dict[str, Any]], str | None]:
    """Run the ranks; return their records and the problem, if any."""
    deadline = time.monotonic() + timeout_seconds
    # Served by this process, so that the system chooses the port.
    store = TCPStore("localhost", 0, None, True, wait_for_workers=False)
    ranks: list[_RankProcess] = []
    try:
        for number in range(_NUM_RANKS):
            ranks.append(_start(number, folder, store.port, timeout_seconds, command))
        problem = _wait(ranks, deadline)
        late = [f"rank {rank.rank} was {rank.record()['step']}" for rank in ranks if rank.is_running()]
    finally:
        for rank in ranks:
            _end(rank.process)
    records = [rank.record() for rank in ranks]
    wrong = [rank.rank for rank, record in zip(ranks, records, strict=True) if record.get("is_right") is False]
    if problem is not None:
        return records, f"{problem}; {_ADVICE}"
    if late:
        return records, f"timed out after {timeout_seconds:g} s: {', '.join(late)}; {_LATE_ADVICE}"
    if wrong:
        return records, f"rank(s) {wrong} got wrong sums by {records[wrong[0]]['transport']}; {_ADVICE}"
    return records, None


def _start(number: int, folder: Path, port: int, timeout_seconds: float, command: Sequence[str]) -> _RankProcess:
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(_NUM_RANKS),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if device_type() == "cuda" and num_devices() < _NUM_RANKS:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # nccl needs a device per rank
    record_path, stderr_path = folder / f"rank_{number}.json", folder / f"rank_{number}.txt"
    with stderr_path.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, str(record_path), str(timeout_seconds)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
        )
    return _RankProcess(rank=number, process=process, record_path=record_path, stderr_path=stderr_path)


def _wait(ranks: Sequence[_RankProcess], deadline: float) -> str | None:
    """Wait until all have exited, one has failed or the deadline passed; return the first failure."""
    first: _RankProcess | None = None
    while time.monotonic() < deadline and any(rank.is_running() for rank in ranks):
        time.sleep(_POLL_SECONDS)
        if first is None:
            first = next((rank for rank in ranks if rank.failed()), None)
            if first is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    failed = [rank for rank in ranks if rank.failed()]
    if not failed:
        return None
    # Both may have failed: a killed one leaves no error, and the other reports a lost connection.
    cause = next((rank for rank in failed if "error" not in rank.record()), first or failed[0])
    return cause.failure_text()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _failure(problem: str, seconds: float) -> Finding:
    problem = f"two processes can't communicate: {problem}"
    data = {"ranks": _NUM_RANKS, "total_seconds": seconds, "error": problem}
    return Finding(name=_NAME, text="FAILED", data=data, problem=problem)


def _success(records: Sequence[dict[str, Any]], seconds: float) -> Finding:
    first, slowest = records[0], max(record["seconds"] for record in records)
    speed = first["bytes"] / slowest
    data = {"ranks": _NUM_RANKS, "total_seconds": seconds, "seconds": slowest, "bytes_per_second": speed}
    data |= {name: first[name] for name in ("backend", "transport", "device", "bytes")}
    transport = (
        first["backend"] if first["transport"] == first["backend"] else f"{first['backend']} and {first['transport']}"
    )
    text = (
        f"{first['bytes'] / 2**20:.0f} MiB on {first['device']} over {_NUM_RANKS} processes by {transport}: "
        f"{1000 * slowest:.1f} ms, {speed / 1e9:.2f} GB/s; sums are right; {seconds:.1f} s including start-up"
    )
    return Finding(name=_NAME, text=text, data=data)
