"""`booster run` with real ranks: joined, failing, started anew, interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

BOOSTER = [sys.executable, "-c", "import sys; from booster.cli import main; sys.exit(main())", "run"]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Returns a function that starts a script on 2 ranks and gives the process of the launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    started = []

    def start(source, *arguments, options=()):
        (tmp_path / "script.py").write_text(source)
        command = [*BOOSTER, "--nproc-per-node", "2", *options, "script.py", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()  # its ranks end with it
        process.communicate()


JOINED = """\
import sys
from booster.launch.coordinator import DistCoordinator
from booster.errors import RankFailedError
from booster.launch import get_config, launch_from_torch
from booster.logger import get_dist_logger

launch_from_torch(config="settings.py", seed=int(sys.argv[1]))
launch_from_torch(seed=3)
coordinator = DistCoordinator()
assert coordinator.local_rank == coordinator.rank
with open("order.txt", "a") as order:
    with coordinator.priority_execution(executor_rank=1):
        print("first" if coordinator.rank == 1 else "second", file=order, flush=True)
try:
    with coordinator.priority_execution():
        if coordinator.rank == 0:
            raise OSError("disk full")
        print("rank 1 ran the block", flush=True)
except (OSError, RankFailedError) as error:
    print(f"{type(error).__name__}: {error}")
coordinator.block_all()
get_dist_logger().info("from one", ranks=[1])
coordinator.print_on_master(f"dim {get_config().model.dim} of {coordinator.world_size}")
"""


def without_gloo(stdout: str) -> list[str]:
    """Returns what the script printed: torch 2.10's gloo prints lines of its own, into each other."""
    return [line for line in stdout.splitlines() if line and "[Gloo]" not in line and "peer ranks" not in line]


@pytest.mark.slow
def test_ranks_join_and_coordinate(start, tmp_path):
    (tmp_path / "settings.py").write_text("model = {'dim': 8}\n")
    process = start(JOINED, "3")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    lines = sorted(without_gloo(stdout))
    assert lines[0] == "OSError: disk full"
    assert lines[1].startswith("RankFailedError: rank 0 failed")
    assert lines[2] == "dim 8 of 2"
    assert len(lines) == 3
    assert (tmp_path / "order.txt").read_text() == "first\nsecond\n"
    # Nothing else on stderr: no warning of the launcher about threads, of torch about a group that was left.
    assert [line.split("] ", 1)[1] for line in stderr.splitlines()] == [
        "[rank 0/2] INFO booster: launched 2 rank(s) on cpu with gloo, seed 3",
        "[rank 1/2] INFO booster: from one",
    ]


PENDING = """\
import torch, torch.distributed as dist
from booster.launch import launch_from_torch

launch_from_torch(verbose=False)
if dist.get_rank() == 1:
    pending = dist.all_reduce(torch.ones(2), async_op=True)  # rank 0 never joins
    raise ValueError("mine")
dist.recv(torch.ones(2), src=1)
"""


@pytest.mark.slow
def test_the_failing_ranks_traceback_is_last_and_nothing_waits(start):
    process = start(PENDING)
    _, stderr = process.communicate(timeout=120)  # the timeout of the collective is 600 s
    assert process.returncode == 1
    assert stderr.endswith('script.py", line 7, in <module>\n    raise ValueError("mine")\nValueError: mine\n')


def test_the_exit_code_of_the_failing_rank(start):
    process = start("import os, signal, sys\nsys.exit(7) if os.environ['RANK'] == '1' else signal.pause()\n")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 7
    assert stderr.endswith("SystemExit: 7\n")
    assert "rank 1 of 2 (local rank 1" in stderr


RESTARTED = """\
import os, sys
from booster.launch.coordinator import DistCoordinator
from booster.launch import launch_from_torch

launch_from_torch(verbose=False)
coordinator = DistCoordinator()
coordinator.block_all()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and coordinator.rank == 1:
    sys.exit(9)
coordinator.block_all()
coordinator.print_on_master(f"finished in attempt {attempt}")
"""


@pytest.mark.slow
def test_a_restart_joins_again(start):
    process = start(RESTARTED, options=["--max_restarts", "1"])
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert without_gloo(stdout) == ["finished in attempt 1"]


def test_an_interrupt_ends_all_ranks(start):
    process = start("import os, signal\nprint(os.getpid())\nsignal.pause()\n")
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr == "booster run: terminated by SIGINT, with all ranks\n"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
