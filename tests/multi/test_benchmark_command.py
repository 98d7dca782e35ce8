"""`booster benchmark` as a user runs it: what it measures, how it fails, and that nothing is left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

COMMAND = [sys.executable, "-m", "booster", "benchmark"]
TINY = ["-b", "8", "-s", "4", "-d", "16", "-w", "0", "-p", "1"]
ENDLESS = ["-g", "2", "-m", "dp", "-d", "16", "-p", str(10**9)]
SECONDS = 300


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def benchmark(*arguments):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=SECONDS, env=environment(), check=False
    )


@contextmanager
def running(*arguments):
    """Starts the command in a group of processes of its own, and checks that all have ended with it."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    seen = Ranks(process)
    try:
        yield process, seen
        _, still_there = psutil.wait_procs(seen.family(), timeout=20)
        assert not still_there
    finally:
        for one in [*seen.family(), *seen.known]:
            if one.is_running():
                one.kill()
        process.kill()
        process.communicate()


class Ranks:
    """The processes below the command: the server, its tracker, and below the server the ranks."""

    def __init__(self, process):
        self._process = process
        self.known = set()

    def family(self):
        with suppress(psutil.NoSuchProcess):
            self.known |= set(psutil.Process(self._process.pid).children(recursive=True))
        return list(self.known)

    def wait_for(self, count):
        """Returns that many ranks that live at one time."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            ranks = [one for one in self.family() if self._is_rank(one)]
            if len(ranks) == count:
                return ranks
        raise AssertionError(f"no {count} ranks within {SECONDS} s")

    def _is_rank(self, process):
        try:
            return process.is_running() and process.ppid() not in (self._process.pid, 0, 1)
        except psutil.NoSuchProcess:
            return False


def read_until(stream, text):
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"the command ended before it wrote {text!r}")


@pytest.mark.slow
def test_every_configuration_of_four_ranks(tmp_path):
    done = benchmark("-g", "4", *TINY, "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["serial", "1d tp=4 dp=1", "1d tp=2 dp=2", "2d q=2", "dp=4", "zero1 dp=4", "zero2 dp=4", "gemini dp=4"]
    lines = done.stdout.splitlines()
    for name in names:
        (line,) = (line for line in lines if line.startswith(f"{name}  "))
        assert line.endswith(" equal")
    assert [line for line in lines if line.startswith("not measured: ")] == [
        "not measured: 2.5d depth=1 q=2: the same as 2d q=2",
        "not measured: 3d: not possible with -g 4: it needs q * q * q ranks with q from 2, so -g 8, 27, 64, 125, ...",
    ]
    assert done.stderr.splitlines() == [f"[{number + 1}/8] {name}" for number, name in enumerate(names)]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    read = json.loads((tmp_path / "out.json").read_text())
    figures = {one["name"]: one["figures"] for one in read["configurations"]}
    assert list(figures) == names
    assert all(one["loss_difference"] <= 2e-5 and one["error"] is None for one in read["configurations"])
    assert_figures(figures)


def assert_figures(figures):
    for name, one in figures.items():
        assert min(one[f"{part}_seconds"] for part in ("forward", "backward", "step", "whole")) > 0, name
        assert len(one["losses"]) == 3
        assert one["losses"][0] > one["losses"][1] > one["losses"][2], name
    # Two layers 16 -> 64 -> 16.
    weights = 4 * 2 * (2 * 16 * 64 + 64 + 16)
    assert figures["serial"]["sent_bytes"] == figures["serial"]["communications"] == 0
    assert figures["serial"]["peak_bytes"] > 4 * weights
    # All three send every gradient and, as often, every update, up to what fills up shards.
    assert 0 <= figures["dp=4"]["sent_bytes"] - 2 * 3 * weights // 4 < 100  # and which parameters were used
    for stage in (1, 2):
        assert figures[f"zero{stage} dp=4"]["sent_bytes"] == pytest.approx(2 * 3 * weights // 4, rel=0.05)
    peaks = {name: one["peak_bytes"] for name, one in figures.items()}
    assert peaks["2d q=2"] < peaks["1d tp=4 dp=1"] < peaks["1d tp=2 dp=2"] < peaks["serial"]
    assert peaks["zero1 dp=4"] < peaks["dp=4"]


@pytest.mark.slow
def test_grids_of_eight_ranks():
    done = benchmark("-g", "8", "-m", "3d,2.5d", "-l", "1", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith(" equal")]
    assert [row.split("  ")[0] for row in rows] == ["serial", "2.5d depth=2 q=2", "3d q=2"]


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_others_are_measured_on():
    with running(*ENDLESS) as (command, ranks):
        read_until(command.stderr, "[1/2] serial")
        ranks.wait_for(1)[0].kill()
        read_until(command.stderr, "[2/2] dp=2")
        ranks.wait_for(2)[1].kill()
        output, errors = command.communicate(timeout=SECONDS)
    assert command.returncode == 1
    why = "the process was killed by SIGKILL, as the system does when memory runs out"
    assert f"failed: serial: rank 0 of 1 failed: {why}" in output
    assert "failed: dp=2: rank " in output
    assert output.count(why) == 2
    assert not errors


@pytest.mark.slow
def test_ctrl_c_ends_all():
    with running(*ENDLESS) as (command, ranks):
        read_until(command.stderr, "[1/2] serial")
        ranks.family()
        os.killpg(command.pid, signal.SIGINT)
        _, errors = command.communicate(timeout=SECONDS)
    assert command.returncode == 130
    assert errors == "booster benchmark: interrupted by Ctrl-C; all processes were terminated\n"


@pytest.mark.slow
def test_ranks_notice_that_the_command_was_killed():
    with running(*ENDLESS) as (command, ranks):
        ranks.wait_for(1)
        command.kill()
        command.communicate(timeout=SECONDS)
    assert command.returncode == -signal.SIGKILL  # and `running` has seen that no process is left


@pytest.mark.slow
def test_what_takes_too_long_is_ended():
    with running(*ENDLESS, "--timeout", "0.5") as (command, _):
        output, _ = command.communicate(timeout=SECONDS)
    assert command.returncode == 1
    assert "failed: serial: ranks [0] of 1 timed out after 0.5 s and were killed: raise --timeout" in output
    assert "failed: dp=2: rank" in output
