"""Rank environment of SLURM's `srun`."""

from __future__ import annotations

import os
import re

from booster.errors import ConfigError
from booster.launch_environment import RankEnvironment, choose_host, choose_port, first_set, read_numbers

__all__ = ["first_host", "num_slurm_tasks", "read_slurm"]

# The step's number first: under `srun --preserve-env` the others are the job's, and in a heterogeneous job SLURM_NPROCS
# counts the tasks of one component.
_STEP_TASKS = "SLURM_STEP_NUM_TASKS"
_NUM_TASKS = (_STEP_TASKS, "SLURM_NTASKS", "SLURM_NPROCS")
# The step's nodes first, too: `srun --nodes 1 --nodelist b` in a job on a and b has its rank 0 on b.
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_JOB_NAMES = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def num_slurm_tasks() -> int:
    """Return the number of processes that `srun` started, or 1 if it did not start this one."""
    text = os.environ.get(_STEP_TASKS, "") if os.environ.get("SLURM_PROCID") else ""
    return int(text) if text.isdecimal() else 1


def read_slurm(host: str | None = None, port: int | None = None) -> RankEnvironment:
    """Read SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, and the variables for the names of job and nodes.

    Raises:
        ConfigError: Variables are missing or not numbers, `srun` did not start this process, or the store address is
            unknown.
    """
    tasks = first_set(_NUM_TASKS) or _STEP_TASKS
    rank, world_size, local_rank = read_numbers("srun", ("SLURM_PROCID", tasks, "SLURM_LOCALID"))
    if world_size == 1:
        return RankEnvironment(rank=rank, world_size=1, local_rank=local_rank)
    if tasks != _STEP_TASKS and os.environ.get("SLURM_JOB_ID") and not os.environ.get("SLURM_STEP_ID"):
        raise ConfigError(
            f"{tasks}={world_size}, but srun did not start this process (it sets SLURM_STEP_ID and {_STEP_TASKS}), so "
            "the other ranks would never start: write `srun python train.py` in the job script"
        )
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=choose_host(host, lambda: _slurm_store_host(rank)),
        port=choose_port(port, "srun", _SLURM_JOB_NAMES),
    )


def first_host(node_list: str) -> str:
    """Return the first name of SLURM's node list: "node003-ib" for "node[003-005,9]-ib,login"."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", node_list.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def _slurm_store_host(rank: int) -> str:
    name = first_set(_NODE_LISTS)
    node_list = os.environ[name] if name is not None else ""
    host = first_host(node_list)
    if not host:
        raise ConfigError(
            f"no host was given, and {name or _NODE_LISTS[0]}={node_list!r} names no node: give host=..., the address "
            "of rank 0's host, or export MASTER_ADDR in the job script"
        )
    if host == node_list.strip():  # the only node: no name resolution needed
        return "localhost"
    here = os.environ.get("SLURMD_NODENAME")
    if rank == 0 and here and here != host:  # as `--distribution=arbitrary` can do
        raise ConfigError(
            f"no host was given, and rank 0 is on {here} in place of {host}, the first of {name}={node_list!r}, where "
            f"the other ranks look for it: give host={here!r}, or export MASTER_ADDR in the job script"
        )
    return host
