"""Rank environment of OpenMPI's `mpirun`."""

from __future__ import annotations

import os
import re

from booster.errors import ConfigError
from booster.launch_environment import RankEnvironment, choose_host, choose_port, read_numbers
from booster.network_interface import nearest_address

__all__ = ["num_openmpi_processes", "read_openmpi"]

_SIZE = "OMPI_COMM_WORLD_SIZE"
_RANK = ("OMPI_COMM_WORLD_RANK", _SIZE, "OMPI_COMM_WORLD_LOCAL_RANK")
_OPENMPI_JOB_NAMES = ("PMIX_NAMESPACE",)
# Addresses of mpirun and of the daemon on this host, which is mpirun itself on its own host.
# OpenMPI 4 sets them, OpenMPI 5 does not.
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"


def num_openmpi_processes() -> int:
    """Return the number of processes that `mpirun` started, or 1 if it did not start this one."""
    text = os.environ.get(_SIZE, "") if os.environ.get(_RANK[0]) else ""
    return int(text) if text.isdecimal() else 1


def read_openmpi(host: str | None = None, port: int | None = None) -> RankEnvironment:
    """Read OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, and the variables for the job's name and mpirun's host.

    Raises:
        ConfigError: Variables are missing or not numbers, or the store address is unknown.
    """
    rank, world_size, local_rank = read_numbers("mpirun", _RANK)
    if world_size == 1:
        return RankEnvironment(rank=rank, world_size=1, local_rank=local_rank)
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=choose_host(host, lambda: _openmpi_store_host(rank, world_size)),
        port=choose_port(port, "mpirun", _OPENMPI_JOB_NAMES),
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
