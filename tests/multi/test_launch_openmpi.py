"""`launch_from_openmpi` under a real mpirun: on one machine, on two, and with mistakes."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import subprocess
import sys

import pytest
from launcher_cases import TRAIN, assert_trained, plain_environment


def _missing():
    if shutil.which("mpirun") is None:
        return "mpirun is not installed (Debian: openmpi-bin)"
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    return None if "Open MPI" in said else f"mpirun is not OpenMPI's: {said[:60]!r}"


_REASON = _missing()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")

# In place of ssh: the command runs on this machine, which calls itself by another name.
AGENT = '#!/bin/sh\nhost=$1; shift\nexec unshare --uts /bin/sh -c "hostname $host; $*"\n'


def _unshare_problem():
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run(["unshare", "--uts", "hostname", "other"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no namespace can be made: {tried.stderr.strip()}"


@pytest.fixture
def mpirun(tmp_path):
    """Returns a function that runs a script under mpirun and gives what became of it."""

    def mpirun(options, source, *arguments):
        (tmp_path / "script.py").write_text(source)
        process = subprocess.Popen(
            [
                *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
                *("--mca", "orte_tmpdir_base", str(tmp_path)),
                *options,
                *(sys.executable, "script.py", *arguments),
            ],
            cwd=tmp_path,
            env=plain_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=300)
        finally:
            process.terminate()  # unlike when it is killed, it ends its processes then
            process.wait()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return mpirun


@pytest.fixture
def two_machines(tmp_path):
    """Returns mpirun's options for other machines that this one plays."""
    problem = _unshare_problem()
    if problem is not None:
        pytest.skip(problem)
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    return lambda hosts: ["--mca", "plm_rsh_agent", str(agent), "--host", hosts]


def told_by(tmp_path, num_ranks):
    return [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.slow
def test_ranks_train_as_one_process_does(mpirun, tmp_path, num_ranks):
    ended = mpirun(["-n", str(num_ranks)], TRAIN, "launch_from_openmpi")
    assert ended.returncode == 0, ended.stderr
    told = told_by(tmp_path, num_ranks)
    assert [(one["rank"], one["local_rank"]) for one in told] == [(rank, rank) for rank in range(num_ranks)]
    assert all(one["weights"] == told[0]["weights"] and one["gloo"] is None for one in told)
    assert_trained(told[0]["weights"])


@pytest.mark.slow
def test_ranks_on_two_machines(mpirun, tmp_path, two_machines):
    ended = mpirun(
        ["-n", "3", *two_machines(f"{socket.gethostname()}:2,booster-other:1")], TRAIN, "launch_from_openmpi"
    )
    assert ended.returncode == 0, ended.stderr
    told = told_by(tmp_path, 3)
    assert [(one["rank"], one["local_rank"]) for one in told] == [(0, 0), (1, 1), (2, 0)]
    assert all(one["weights"] == told[0]["weights"] for one in told)
    assert_trained(told[0]["weights"])
    # The other machine's name stands for nothing, and for gloo that would be its loopback.
    assert told[2]["gloo"] not in (None, "lo")


@pytest.mark.slow
def test_rank_0_on_another_machine_than_mpirun(mpirun, two_machines):
    ended = mpirun(["-n", "2", *two_machines("booster-one:1,booster-other:1")], TRAIN, "launch_from_openmpi")
    assert ended.returncode == 1
    assert "mpirun runs on another host than rank 0" in ended.stderr


@pytest.mark.slow
def test_the_host_that_the_user_gives_is_taken_then(mpirun, tmp_path, two_machines):
    place = ["-x", "MASTER_ADDR=127.0.0.1"]
    ended = mpirun([*place, "-n", "2", *two_machines("booster-one:1,booster-other:1")], TRAIN, "launch_from_openmpi")
    assert ended.returncode == 0, ended.stderr
    assert_trained(told_by(tmp_path, 2)[1]["weights"])


def test_the_function_for_another_launcher_trains_no_rank_alone(mpirun, tmp_path):
    ended = mpirun(["-n", "2"], TRAIN, "launch_from_torch")
    assert ended.returncode == 1
    assert "mpirun started 2 processes" in ended.stderr
    assert "launch_from_openmpi()" in ended.stderr
    assert not list(tmp_path.glob("rank_*"))


FAILING = """\
import torch
import booster

booster.launch_from_openmpi(verbose=False)
if booster.DistCoordinator().rank == 1:
    raise ValueError("mine")
torch.distributed.recv(torch.ones(2), src=1)
"""


@pytest.mark.slow
def test_a_failing_rank_ends_all(mpirun):
    ended = mpirun(["-n", "2"], FAILING)  # rank 0 would wait for 600 s
    assert ended.returncode != 0
    assert "ValueError: mine" in ended.stderr
