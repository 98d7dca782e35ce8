"""`booster run` after a rank was lost: who was the cause, who was ended for it, where all were, and who starts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from launcher_cases import plain_environment

LIMIT_SECONDS = 240.0  # for imports on a busy machine

# Two ranks that wait for each other, until rank 1 is lost in its backward, after it has said that it is there.
WAITING = """\
import os, signal, sys
import torch
import booster
from booster.comm import all_reduce_sum
from booster.fault_tolerance.heartbeat import read_heartbeats
from booster.fault_tolerance.progress import Phase

booster.launch_from_torch(verbose=False, timeout_seconds=3)
ones = torch.ones(3)
all_reduce_sum(ones)
if os.environ["RANK"] == "1":
    with Phase("backward"):
        while 1 not in (heartbeats := read_heartbeats([1])) or heartbeats[1].progress.phases != ("backward",):
            pass
        if sys.argv[1] == "leave":
            sys.exit(0)
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
with Phase("forward"):
    all_reduce_sum(ones)
"""

# Ranks without torch; rank 1 is killed in so many attempts.
DYING = """\
import os, signal, sys
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(sys.argv[1]):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    while True:
        signal.pause()
"""


@dataclass(frozen=True)
class Ended:
    code: int
    words: list[str]  # the launcher's own, one entry each, with what follows
    output: str


@pytest.fixture
def run(tmp_path):
    def start(script, *arguments, options=()):
        (tmp_path / "script.py").write_text(script)
        command = [sys.executable, "-m", "booster", "run", "--nproc-per-node", "2", *options, "script.py", *arguments]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=plain_environment(),
            text=True,
            capture_output=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        print(ended.stdout, ended.stderr)
        words = re.split(r"^booster run: ", ended.stderr, flags=re.MULTILINE)[1:]
        return Ended(code=ended.returncode, words=words, output=ended.stderr)

    return start


@pytest.mark.slow
def test_a_stopped_rank_continues_and_is_ended_at_once_and_is_not_the_cause(run):
    ended = run(WAITING, "SIGSTOP")
    assert ended.code == 1
    *_, stopped, cause = ended.words
    # Not by SIGKILL, which the launcher takes for those that did not end for 30 s.
    assert re.fullmatch(r"rank 1 of 2 \(.*\) was stopped, and was terminated by the launcher\n", stopped)
    assert re.match(r"rank 0 of 2 \(.*\) failed with exit code 1, first of all:\n", cause)
    assert re.search(r"RankFailedError: rank 0 could not .*rank 1", cause)
    assert "memory runs out" not in ended.output
    assert "last heartbeats" not in ended.output  # the cause spoke for itself


def test_a_killed_rank_is_the_cause_and_all_places_are_told(run):
    ended = run(WAITING, "SIGKILL")
    assert ended.code == 137
    survivor, cause, heartbeats = ended.words
    places = re.match(r"last heartbeats of the ranks \(sent .*\): rank 0, (.*); rank 1, (.*)\n", heartbeats)
    assert re.fullmatch(r"\d+\.\d s before the end: after 0 steps, in backward for .*", places[2])
    assert re.match(r"\d+\.\d s before the end: after 0 steps, ", places[1])
    assert survivor.startswith("rank 0 of 2")
    assert re.fullmatch(r"rank 1 of 2 \(local rank 1, pid \d+\) was killed by SIGKILL, as the .* memory.*\n", cause)


@pytest.mark.slow
def test_a_rank_that_left_early_is_named_by_the_one_that_said_so(run):
    ended = run(WAITING, "leave")
    assert ended.code == 1
    left, cause = ended.words
    assert re.match(r"rank 1 of 2 \(.*\) (failed with exit code 1|was terminated by the launcher)", left)
    assert re.match(r"rank 0 of 2 \(.*\) failed with exit code 1, first of all:\nTraceback", cause)
    assert re.search(r"RankFailedError: rank 0 could not .*rank 1's program ended", cause)


@pytest.mark.slow
def test_a_signal_that_is_not_the_launchers_is_told_from_its_own(run):
    ended = run(DYING, "1", "SIGTERM")
    assert ended.code == 143
    other, cause = ended.words
    assert re.fullmatch(r"rank 0 of 2 \(.*\) was terminated by the launcher\n", other)
    assert re.fullmatch(r"rank 1 of 2 \(.*\) was terminated by SIGTERM, which the launcher did not send\n", cause)


@pytest.mark.parametrize(("attempts", "code"), [(2, 0), pytest.param(3, 137, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_each_new_start_is_said_with_its_reason(run, attempts, code):
    ended = run(DYING, str(attempts), "SIGKILL", options=["--max-restarts", "2"])
    assert ended.code == code
    for number in (1, 2):
        how = r"rank 1 of 2 \(local rank 1, pid \d+\) was killed by SIGKILL.*"
        pattern = rf"{how}; restarting all ranks, restart {number} of 2\n"
        assert re.fullmatch(pattern, ended.words[number - 1])
    assert len(ended.words) == 2 + (3 if code else 0)
    assert not code or ended.words[2] == "all restarts of --max-restarts 2 are used, so the run ends\n"


@pytest.mark.slow
def test_places_are_those_of_the_last_start(run):
    ended = run(WAITING, "SIGKILL", options=["--max-restarts", "1"])
    assert ended.code == 137
    assert "restarting all ranks, restart 1 of 1" in ended.words[0]
    assert ended.words[1] == "all restarts of --max-restarts 1 are used, so the run ends\n"
    assert "last heartbeats" in ended.words[-1]
    assert re.search("rank 1, .* in backward", ended.words[-1])
