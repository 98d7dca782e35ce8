"""Rank environment: this process's rank, world size and store address from a launcher's environment variables."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from booster.errors import ConfigError
from booster.fault_tolerance.timeouts import Timeouts, check_seconds
from booster.rng_state import check_seed
from booster.validation import is_int

from .network import nearest_address

# Variables of `booster run` and torchrun; job scripts set some of those without the rank.
TORCH_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_TORCH_NUMBERS = (*TORCH_RANK, "MASTER_PORT")
TORCH = (*_TORCH_NUMBERS, "MASTER_ADDR")

# Note [Store address]
# srun and mpirun set the rank of a process, but no store address. It is, in this order: the argument; MASTER_ADDR and
# MASTER_PORT, which job scripts often export; derived from the launcher's other variables. The address is that of rank
# 0's host; rank 0 raises at once if it is not. The port is derived from the job's name, so that all ranks compute the
# same one and two jobs on one host rarely share it.
_FIRST_PORT, _NUM_PORTS = 15000, 15000  # below the ephemeral ports: 32768 and up on Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Rank of this process and store address; `local_rank` is None if unknown, host and port may be empty."""

    rank: int
    world_size: int
    local_rank: int | None
    host: str = ""
    port: int = 0


def read_torch() -> RankEnvironment:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
    _require("booster run", TORCH)
    rank, world_size, local_rank, port = _read_numbers("booster run", _TORCH_NUMBERS)
    host = os.environ["MASTER_ADDR"]
    return RankEnvironment(rank=rank, world_size=world_size, local_rank=local_rank, host=host, port=port)


def _read_numbers(launcher: str, names: Sequence[str]) -> list[int]:
    """Return the values of numeric variables of a launcher; raise `ConfigError` if some are missing or no numbers."""
    _require(launcher, names)
    wrong = [f"{name}={os.environ[name]!r}" for name in names if not os.environ[name].strip().isdecimal()]
    if wrong:
        raise ConfigError(
            f"environment variables are not numbers: {', '.join(wrong)}; so the rank of this process is unknown: start "
            f"it with `{launcher}`, or correct them"
        )
    return [int(os.environ[name]) for name in names]


def first_set(names: Sequence[str]) -> str | None:
    """Return the first of these variables that is set and not empty, or None."""
    return next((name for name in names if os.environ.get(name)), None)


def _choose_port(port: int | None, launcher: str, names: Sequence[str]) -> int:
    """Return the port of the store: as given, else MASTER_PORT, else derived from the variables that name the job."""
    if port is not None:
        return port
    if os.environ.get("MASTER_PORT"):
        return _read_numbers(launcher, ["MASTER_PORT"])[0]
    if first_set(names) is None:
        raise ConfigError(
            f"no port was given, and none can be derived from the job's name, as `{launcher}` sets none of "
            f"{', '.join(names)} here: give port=..., equal on all ranks"
        )
    name = ".".join(os.environ.get(name, "") for name in names)
    return _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS


def _require(launcher: str, names: Sequence[str]) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"environment variables are missing: {', '.join(missing)}; so the rank of this process is unknown: start "
            f"it with `{launcher}`, which sets {', '.join(names)}"
        )


_RANK = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_OPENMPI_JOB_NAMES = ("PMIX_NAMESPACE",)
# Addresses of mpirun and of the daemon on this host, which is mpirun itself on its own host.
# OpenMPI 4 sets them, OpenMPI 5 does not.
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"


def read_openmpi(host: str | None = None, port: int | None = None) -> RankEnvironment:
    """Read OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, and the variables for the job's name and mpirun's host."""
    rank, world_size, local_rank = _read_numbers("mpirun", _RANK)
    if world_size == 1:
        return RankEnvironment(rank=rank, world_size=1, local_rank=local_rank)
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=(os.environ.get("MASTER_ADDR") or _openmpi_store_host(rank, world_size)) if host is None else host,
        port=_choose_port(port, "mpirun", _OPENMPI_JOB_NAMES),
    )


def _openmpi_store_host(rank: int, world_size: int) -> str:
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world_size):
        return "localhost"
    mpirun = os.environ.get(_MPIRUN, "")
    addresses = _addresses(mpirun)
    if not addresses:
        raise ConfigError(
            f"no host was given, and with {world_size} ranks on several hosts this OpenMPI reports no address of rank "
            f"0 ({_MPIRUN}={mpirun!r}): give host=..., the address of rank 0's host, or start with "
            "`mpirun -x MASTER_ADDR=...`"
        )
    if os.environ.get(_DAEMON) == mpirun:
        return "localhost"
    if rank == 0:  # the only rank that can detect it; mpirun ends the others when it fails
        raise ConfigError(
            "no host was given, and mpirun runs on another host than rank 0, where the other ranks look for it: give "
            "host=..., the address of rank 0's host, start with `mpirun -x MASTER_ADDR=...`, or start mpirun on the "
            "first of the hosts"
        )
    return nearest_address(addresses)


def _addresses(uri: str) -> list[str]:
    """Return the addresses of `id;tcp://10.0.0.1,192.168.0.1:4711;tcp6://[fd00::1]:4712`, in this order."""
    joined = re.findall(r"tcp6?://([^;]*):\d+", uri)
    return [address for part in joined for address in part.replace("[", "").replace("]", "").split(",") if address]


# The step's number first: under `srun --preserve-env` the others are the job's, and in a heterogeneous job SLURM_NPROCS
# counts the tasks of one component.
_STEP_TASKS = "SLURM_STEP_NUM_TASKS"
_NUM_TASKS = (_STEP_TASKS, "SLURM_NTASKS", "SLURM_NPROCS")
# The step's nodes first, too: `srun --nodes 1 --nodelist b` in a job on a and b has its rank 0 on b.
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_JOB_NAMES = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def read_slurm(host: str | None = None, port: int | None = None) -> RankEnvironment:
    """Read SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, and the variables for the names of job and nodes."""
    tasks = first_set(_NUM_TASKS) or _STEP_TASKS
    rank, world_size, local_rank = _read_numbers("srun", ("SLURM_PROCID", tasks, "SLURM_LOCALID"))
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
        host=(os.environ.get("MASTER_ADDR") or _slurm_store_host(rank)) if host is None else host,
        port=_choose_port(port, "srun", _SLURM_JOB_NAMES),
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


def check_no_other_launcher() -> None:
    """Raise `ConfigError` if `srun` or `mpirun` started several processes; called without the variables of torchrun."""
    for launcher, rank, size, function in (
        ("srun", "SLURM_PROCID", _STEP_TASKS, "launch_from_slurm"),
        ("mpirun", _RANK[0], _RANK[1], "launch_from_openmpi"),
    ):
        count = os.environ.get(size, "")
        if os.environ.get(rank) and count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{launcher} started {int(count)} processes without the variables of `booster run`, so each would "
                f"train alone in a world of one: call booster.{function}() in place of launch_from_torch()"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Arguments of `launch` that must match in a second launch; checked on construction."""

    rank: int
    world_size: int
    host: str
    port: int
    backend: str
    local_rank: int | None
    seed: int
    timeout_seconds: float
    setup_timeout_seconds: float
    checkpoint_timeout_seconds: float

    def __post_init__(self) -> None:
        check_seed(self.seed)
        self._check_types()
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} with world_size={self.world_size} is outside of the world: "
                "ranks count from 0 to world_size - 1"
            )
        if self.local_rank is not None and not 0 <= self.local_rank < self.world_size:
            raise ConfigError(
                f"local_rank={self.local_rank} with world_size={self.world_size} is outside of the world: "
                "give the rank's index on its host, from 0"
            )
        for name in ("timeout_seconds", "setup_timeout_seconds", "checkpoint_timeout_seconds"):
            check_seconds(name, getattr(self, name))
        check_backend(self.backend)

    def _check_types(self) -> None:
        numbers: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size}
        if is_int(self.world_size) and self.world_size > 1:
            numbers["port"] = self.port
        if self.local_rank is not None:
            numbers["local_rank"] = self.local_rank
        for name, value in numbers.items():
            if not is_int(value):
                raise ConfigError(
                    f"{name} must be an int, got {value!r} ({type(value).__name__}): write {name}=int(os.environ[...])"
                    " where it comes from the environment"
                )

    def timeouts(self) -> Timeouts:
        return Timeouts(
            training=self.timeout_seconds, setup=self.setup_timeout_seconds, checkpoint=self.checkpoint_timeout_seconds
        )

    def check_store_address(self) -> None:
        """Raise `ConfigError` unless host and port are a valid store address, if there are several ranks."""
        if self.world_size > 1 and not (self.host and 0 < self.port < 2**16):
            raise ConfigError(
                f"host={self.host!r}, port={self.port} is not a store address for {self.world_size} ranks: give the "
                "address of rank 0's host and a port in 1 .. 65535"
            )


def check_backend(backend: str) -> None:
    """Raise `ConfigError` unless this torch has the backend, or each of a list such as "cpu:gloo,cuda:nccl"."""
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed: install one from pytorch.org that has it")
    if not isinstance(backend, str):
        raise ConfigError(
            f"backend={backend!r} is a {type(backend).__name__}: give a name such as 'gloo' or 'nccl', or None for the"
            " default"
        )
    for part in backend.split(","):
        if part.split(":")[-1].lower() not in available_backends():
            raise ConfigError(
                f"backend={backend!r} is not in this torch: choose one of {', '.join(available_backends())}, "
                "or None for the default"
            )


def available_backends() -> list[str]:
    """Return the names of the backends that this torch can start."""
    names = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    return [name for name in names if dist.is_backend_available(name)]
