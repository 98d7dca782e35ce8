"""Ranks that start at once build a kernel once, and a build that is killed leaves nothing that anyone loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import distributed
from tiny_kernel import num_compiled, tiny_kernel, write_compiler, write_sources

from booster.kernels.loader import load_kernel


@distributed(world_size=4)
@pytest.mark.parametrize("compiles", [True, False])
def test_one_build_for_all_ranks(tmp_path, compiles):
    if dist.get_rank() == 0:
        write_sources(tmp_path / "csrc", **({} if compiles else {"code": "no C++"}))
        write_compiler(tmp_path, slow="sleep 0.3")
    dist.barrier()
    with tiny_kernel(tmp_path, CXX=tmp_path / "compiler.sh"):
        found = load_kernel("tiny")
    dist.barrier()
    assert (found is not None) == compiles
    assert num_compiled(tmp_path) == 1
    assert not list((tmp_path / "cache").glob("*building*"))


LOAD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tiny_kernel import tiny_kernel
from booster.kernels.loader import load_kernel
folder = Path(sys.argv[1])
with tiny_kernel(folder, CXX=folder / "compiler.sh"):
    print(load_kernel("tiny").answer())
"""


def start(folder):
    tests = str(Path(__file__).resolve().parents[1] / "cases")
    command = [sys.executable, "-c", LOAD, str(folder), tests]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_broken(tmp_path):
    write_sources(tmp_path / "csrc")
    write_compiler(tmp_path, slow="sleep 600")
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while num_compiled(tmp_path) == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # and the compiler with it
    process.communicate()
    assert len(list((tmp_path / "cache").glob("*.building-*"))) == 1
    write_compiler(tmp_path)
    process = start(tmp_path)
    output, errors = process.communicate(timeout=60)
    assert (output.strip(), process.returncode) == ("42", 0), errors
    assert num_compiled(tmp_path) == 2
    assert not list((tmp_path / "cache").glob("*.building-*"))
