"""`launch_from_slurm` with the variables that srun sets, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launcher_cases import TRAIN, assert_trained, plain_environment

# Addresses of this machine as names of two nodes. Those variables that name the job in place of the step are wrong on
# purpose: the step is a part of the job.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    "SLURM_JOB_NODELIST": "absent[001-004]",
    "SLURM_NODELIST": "absent[001-004]",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.99",
}


def task_variables(rank):
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}
    return STEP | place | {"SLURMD_NODENAME": f"127.0.0.{rank // 2 + 1}"}


@pytest.fixture
def srun(tmp_path):
    """Returns a function that starts the script as srun does and gives exit codes and what was said on stderr."""
    (tmp_path / "train.py").write_text(TRAIN)
    processes = []

    def srun(function, environments):
        for environment in environments:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "train.py", function],
                    cwd=tmp_path,
                    env=plain_environment(**environment),
                    text=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            )
        said = [process.communicate(timeout=300)[1] for process in processes]
        return [process.returncode for process in processes], said

    yield srun
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_tasks_on_two_nodes_train_as_one_process_does(srun, tmp_path):
    codes, said = srun("launch_from_slurm", [task_variables(rank) for rank in range(4)])
    assert codes == [0] * 4, said
    told = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(4)]
    assert [(one["rank"], one["local_rank"], one["world_size"]) for one in told] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 0, 4),
        (3, 1, 4),
    ]
    assert all(one["weights"] == told[0]["weights"] for one in told)
    assert_trained(told[0]["weights"])


def test_the_function_for_another_launcher_trains_no_rank_alone(srun, tmp_path):
    codes, said = srun("launch_from_torch", [task_variables(rank) for rank in range(2)])
    assert codes == [1, 1]
    assert all("srun started 4 processes" in text and "launch_from_slurm()" in text for text in said)
    assert not list(tmp_path.glob("rank_*"))
