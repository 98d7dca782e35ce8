"""Programs that have done all they should end well: no thread of ours is in C++ while the interpreter ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("exits.py")
ENDS = (
    "launch_only",
    "training",
    "saves",
    "async_save",
    "monitor",
    "sys_exit",
    "error",
    "user_destroys",
    "late_answer",
)


def counted(ends, num_programs):
    """Returns how the ranks of so many programs ended."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), ",".join(ends), str(num_programs)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"},
        capture_output=True,
        text=True,
        timeout=60 + 30 * num_programs * len(ends),
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_programs_end_well():
    ends = ("late_answer", "async_save", "user_destroys", "sys_exit", "error")
    assert counted(ends, 1) == {end: {"well": 2} for end in ends}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_five_hundred_ends(end):
    num_programs = 28  # of two ranks, and nine ways to end
    assert counted([end], num_programs) == {end: {"well": 2 * num_programs}}
