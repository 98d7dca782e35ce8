"""`booster check --comm`: two real processes that sum, and what is said of those that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist

from booster.cli import main
from booster.cli.check import communication

CHECK = [sys.executable, "-c", "import sys; from booster.cli import main; sys.exit(main())", "check", "--comm"]


def test_two_processes_sum(capfd):
    assert main(["check", "--comm", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)  # of all that reached stdout: nothing else did
    found = told["communication"]["all-reduce"]
    assert (told["ok"], found["ok"], found["ranks"], found["bytes"]) == (True, True, 2, 2**24)
    assert found["bytes_per_second"] == pytest.approx(2**24 / found["seconds"])
    assert 0 < found["seconds"] < found["total_seconds"]


@pytest.fixture
def found(tmp_path):
    """Returns a function that lets a script stand for the ranks and gives what is found."""

    def found(source, timeout_seconds=30):
        (tmp_path / "rank.py").write_text(RANK + textwrap.dedent(source))
        return communication(timeout_seconds, [sys.executable, str(tmp_path / "rank.py")]).findings[0]

    return found


RANK = """\
import json, os, pathlib, signal, sys
rank = os.environ["RANK"]
def note(**record):
    pathlib.Path(sys.argv[1]).write_text(json.dumps(record))
DONE = {"step": "done", "is_right": True, "bytes": 8, "seconds": 0.5, "backend": "b", "transport": "t", "device": "cpu"}
"""


def test_the_slower_rank_counts(found):
    one = found("note(**DONE | {'seconds': 0.5 + int(rank)})")
    assert one.problem is None
    assert (one.data["seconds"], one.data["bytes_per_second"]) == (1.5, 8 / 1.5)
    assert "0 MiB on cpu over 2 processes by b and t" in one.text


def test_wrong_sums_are_found(found):
    one = found("note(**DONE | {'is_right': rank == '0'})")
    assert "rank(s) [1] got wrong sums by t" in one.problem


def test_a_rank_that_raises_is_named(found):
    one = found("note(step='summing', error='ValueError: mine')\nsys.exit(rank == '1')")
    assert "rank 1 failed while summing: ValueError: mine" in one.problem
    assert one.data["error"] == one.problem


def test_a_killed_rank_is_the_cause_and_not_the_one_that_lost_it(found):
    one = found(
        """
        note(step="summing")
        if rank == "0":
            note(step="summing", error="RuntimeError: Connection closed by peer")
            sys.exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert "rank 1 failed while summing: was killed by signal 9 (no output)" in one.problem


def test_a_rank_that_cannot_start_tells_why(found):
    one = found("import no_such_module")
    assert "failed while starting: exited with code 1 (ModuleNotFoundError" in one.problem


@pytest.mark.slow
def test_what_is_too_late_is_named_and_ended(found, tmp_path):
    one = found(
        f"""
        note(**DONE)
        if rank == "1":
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
            note(step="measuring")
            signal.pause()
        """,
        timeout_seconds=2,
    )
    assert "timed out after 2 s: rank 1 was measuring; raise --comm-timeout" in one.problem
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_rank_that_waits_for_a_failed_one_is_ended(found):
    one = found("note(step='summing')\nsys.exit(3) if rank == '1' else signal.pause()")
    assert "rank 1 failed while summing: exited with code 3" in one.problem


def test_an_interrupt_ends_both(tmp_path):
    told = tmp_path / "told"
    os.mkfifo(told)
    # Each process of the check comes by here first: the ranks say that they are there, and stay.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if 'TORCHELASTIC_USE_AGENT_STORE' in os.environ:\n"
        f"    with open({str(told)!r}, 'w') as file:\n"
        "        print(os.getpid(), file=file)\n"
        "    signal.pause()\n"
    )
    process = subprocess.Popen(CHECK, env=os.environ | {"PYTHONPATH": str(tmp_path)}, stderr=subprocess.PIPE, text=True)
    try:
        pids = []
        while len(pids) < 2:  # a read while the other writes reads both together
            pids += [int(line) for line in told.read_text().split()]
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert stderr == "booster check: terminated by SIGINT, with both processes\n"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_rank_ends_with_the_check_however_that_ends(tmp_path):
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)  # to which no rank 1 ever comes
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    place |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, "-m", "booster.cli.check_rank", str(tmp_path / "record"), "600"]
    process = subprocess.Popen(
        command, env=os.environ | place, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.stdin.close()  # as the system does when the check is gone
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "record").is_file() or "error" not in (tmp_path / "record").read_text()
