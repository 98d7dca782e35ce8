"""What a killed rank had started does not outlive the run, nor meet the ranks that start anew."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
from launcher_cases import plain_environment

SCRIPT = """\
import os, signal, subprocess, sys

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
with open(f"child-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w") as file:
    file.write(str(child.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""


def _is_gone(process_id):
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_children_of_a_killed_rank_are_ended(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = "import sys; from booster.cli import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", command, "run", "--nproc-per-node", "1", "--max-restarts", "1", "script.py"],
        cwd=tmp_path,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 137, ended.stderr
    children = [int((tmp_path / f"child-{attempt}").read_text()) for attempt in (0, 1)]
    deadline = time.monotonic() + 10
    while not all(_is_gone(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(_is_gone(child) for child in children)
