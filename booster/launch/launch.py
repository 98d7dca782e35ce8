"""Launch of the process group, from explicit arguments or a launcher's environment variables."""

from __future__ import annotations

import argparse
import atexit
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from booster.comm import group_size, host_group
from booster.device import current_device, default_backend, device_type, set_device
from booster.errors import ConfigError
from booster.fault_tolerance.collective_errors import abort_waits
from booster.fault_tolerance.heartbeat import ENDED, start_heartbeat, stop_heartbeat
from booster.fault_tolerance.shutdown import exit_for_lost_ranks, shutdown_barrier
from booster.fault_tolerance.timeouts import register_group, set_timeouts, timeouts
from booster.logger import get_dist_logger
from booster.rng_state import set_default_seed, set_seed

from .config import Config
from .environments import (
    TORCH,
    TORCH_RANK,
    LaunchSettings,
    RankEnvironment,
    check_no_other_launcher,
    first_set,
    read_openmpi,
    read_slurm,
    read_torch,
)
from .network import choose_gloo_interface, local_address
from .rendezvous import RankInfo, open_store, rendezvous, report_missing_ranks

_EQUAL_SETTINGS = (  # on all ranks
    *("world_size", "backend", "seed"),
    *("timeout_seconds", "setup_timeout_seconds", "checkpoint_timeout_seconds"),
)
ConfigSource = Mapping[str, Any] | str | Path | None


@dataclass(slots=True, kw_only=True)
class _World:
    settings: LaunchSettings
    local_rank: int
    config: Config | None
    is_ours: bool  # False if adopted from the user's init_process_group
    process_id: int = field(default_factory=os.getpid)


_world: _World | None = None
_registered_at_exit = False


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: ConfigSource = None,
    *,
    timeout_seconds: float = 600,
    setup_timeout_seconds: float = 1800,
    checkpoint_timeout_seconds: float = 1800,
) -> None:
    """Initialize the process group, select this rank's device and seed all generators.

    A second call with the same settings does nothing. A process group that the user initialized with the same rank and
    world size is adopted, and left to the user to destroy. Ours is destroyed when the process ends.

    Collective: every rank must call it, with equal arguments but for its ranks.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks.
        host: Address of rank 0's host. Not used in a world of one.
        port: Free port on that host. Not used in a world of one.
        backend: Communication backend, optional; defaults to nccl on CUDA devices, else gloo.
        local_rank: Rank of this process on its host, and index of its accelerator; optional, counted by host names by
            default.
        seed: Seed of all generators on all ranks, 0 .. 2**32 - 1. Also the seed of the order of shuffled loaders passed
            to `boost`, unless they have a generator.
        verbose: If True, rank 0 logs a line when all ranks have joined.
        config: Settings of the script, a dict or the path of a Python file, read by `booster.get_config()`.
        timeout_seconds: Timeout of collectives in training; the timeouts are equal on all ranks.
        setup_timeout_seconds: Timeout of the launch, of new process groups, and of `boost()`.
        checkpoint_timeout_seconds: Timeout of collectives in a save or a load.

    Raises:
        ConfigError: The arguments are invalid, or differ from an earlier call's or between ranks.
        RankFailedError: A rank is too late.
    """
    global _registered_at_exit
    settings = LaunchSettings(
        rank=rank,
        world_size=world_size,
        host=host,
        port=port,
        backend=backend or _known_backend(),
        local_rank=local_rank,
        seed=seed,
        timeout_seconds=timeout_seconds,
        setup_timeout_seconds=setup_timeout_seconds,
        checkpoint_timeout_seconds=checkpoint_timeout_seconds,
    )
    loaded = None if config is None else Config.load(config)
    if _already_launched(settings, loaded):
        return
    if dist.is_initialized():
        _adopt(settings, loaded)
    else:
        _start(settings, loaded)
    if not _registered_at_exit:
        atexit.register(_shutdown_at_exit)
        _registered_at_exit = True
    start_heartbeat(on_ranks_ended=abort_waits, on_ranks_lost=exit_for_lost_ranks)
    set_seed(seed)
    set_default_seed(seed)
    if verbose:
        get_dist_logger().info(
            f"launched {world_size} rank(s) on {current_device().type} with {settings.backend}, seed {seed}", ranks=[0]
        )


def launch_from_torch(
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: ConfigSource = None,
    *,
    timeout_seconds: float = 600,
    setup_timeout_seconds: float = 1800,
    checkpoint_timeout_seconds: float = 1800,
) -> None:
    """Launch with the environment variables of `booster run` or torchrun; without them as a world of one.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The arguments are those of `launch`.
    Collective: every rank must call it.

    Raises:
        ConfigError: Variables are missing or not numbers, srun or mpirun started several processes without them, or as
            in `launch`.
    """
    if first_set(TORCH_RANK) is not None:
        environment = read_torch()
    elif dist.is_initialized() and _world is not None:  # launched in another way: this call is the second
        known = {one.name: getattr(_world.settings, one.name) for one in fields(RankEnvironment)}
        environment = RankEnvironment(**known)
    elif dist.is_initialized():
        environment = RankEnvironment(rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=None)
    else:
        check_no_other_launcher()
        if first_set(TORCH) is not None:
            read_torch()  # raises and names the missing ones
        get_dist_logger().info(
            "no launcher's variables in the environment: a world of one; for more start with `booster run`"
        )
        environment = RankEnvironment(rank=0, world_size=1, local_rank=0)
    launch(
        **asdict(environment),
        backend=backend,
        seed=seed,
        verbose=verbose,
        config=config,
        timeout_seconds=timeout_seconds,
        setup_timeout_seconds=setup_timeout_seconds,
        checkpoint_timeout_seconds=checkpoint_timeout_seconds,
    )


def launch_from_slurm(
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: ConfigSource = None,
    *,
    timeout_seconds: float = 600,
    setup_timeout_seconds: float = 1800,
    checkpoint_timeout_seconds: float = 1800,
) -> None:
    """Launch with the environment variables of `srun`: `srun python train.py`, one task per rank.

    Reads SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS, SLURM_NPROCS) and SLURM_LOCALID.
    Collective: every rank must call it. The other arguments are those of `launch`.

    Args:
        host: Address of rank 0's host, optional; defaults to MASTER_ADDR if it is set, else the first node of the job
            step, which is that of rank 0 in every distribution of tasks but "arbitrary".
        port: Free port on that host, optional; defaults to MASTER_PORT if it is set, else one in 15000 .. 29999 derived
            from the numbers of job and step.

    Raises:
        ConfigError: Variables are missing or not numbers, `srun` did not start this process, host or port are unknown,
            or as in `launch`.
    """
    launch(
        **asdict(read_slurm(host, port)),
        backend=backend,
        seed=seed,
        verbose=verbose,
        config=config,
        timeout_seconds=timeout_seconds,
        setup_timeout_seconds=setup_timeout_seconds,
        checkpoint_timeout_seconds=checkpoint_timeout_seconds,
    )


def launch_from_openmpi(
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: ConfigSource = None,
    *,
    timeout_seconds: float = 600,
    setup_timeout_seconds: float = 1800,
    checkpoint_timeout_seconds: float = 1800,
) -> None:
    """Launch with the environment variables of OpenMPI's `mpirun`: `mpirun -n 4 python train.py`.

    Reads OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK; MPI itself is not used.
    Collective: every rank must call it. The other arguments are those of `launch`.

    Args:
        host: Address of rank 0's host, optional; defaults to MASTER_ADDR if it is set (`mpirun -x MASTER_ADDR`), else
            localhost if all ranks are on one host, else mpirun's host. Rank 0 raises an error if it is on another one,
            and all ranks do if OpenMPI does not report it, as from version 5 on.
        port: Free port on that host, optional; defaults to MASTER_PORT if it is set, else one in 15000 .. 29999 derived
            from the name of the job.

    Raises:
        ConfigError: Variables are missing or not numbers, host or port are unknown, or as in `launch`.
    """
    launch(
        **asdict(read_openmpi(host, port)),
        backend=backend,
        seed=seed,
        verbose=verbose,
        config=config,
        timeout_seconds=timeout_seconds,
        setup_timeout_seconds=setup_timeout_seconds,
        checkpoint_timeout_seconds=checkpoint_timeout_seconds,
    )


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser with the arguments of `launch`, which a script may extend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="path of the config file")
    parser.add_argument("--host", type=str, help="address of rank 0's host")
    parser.add_argument("--port", type=int, help="free port on that host")
    parser.add_argument("--world_size", type=int, help="number of ranks")
    parser.add_argument("--rank", type=int, help="global rank of this process")
    parser.add_argument("--local_rank", type=int, help="rank of this process on its host")
    parser.add_argument("--backend", type=str, default=None, help="communication backend; default: by the device")
    return parser


def get_config() -> Config:
    """Return the config of the launch.

    Raises:
        ConfigError: There was no launch yet, or one without a config.
    """
    if _world is None:
        raise ConfigError(
            "get_config() before a launch has nothing to read: call booster.launch_from_torch(config=...) first"
        )
    if _world.config is None:
        raise ConfigError("get_config() has nothing to read: the launch got no config; pass config=... to it")
    return _world.config


def launched_local_rank() -> int | None:
    """Return the local rank of the launch, or None without one."""
    return _world.local_rank if _world is not None and dist.is_initialized() else None


def destroy_world() -> None:
    """Destroy all process groups and reset the launch; another one may follow. Does nothing without a launch.

    Collective: every rank should call it, when no collective is in flight.
    """
    global _world
    _world = None
    set_timeouts(None)
    stop_heartbeat(ENDED)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _already_launched(settings: LaunchSettings, config: Config | None) -> bool:
    global _world
    if _world is not None and not dist.is_initialized():
        _world = None  # the user destroyed the group
        set_timeouts(None)
    if _world is None:
        return False
    names = [field.name for field in fields(LaunchSettings)]
    differing = [name for name in names if getattr(settings, name) != getattr(_world.settings, name)]
    if differing:
        earlier = ", ".join(f"{name}={getattr(_world.settings, name)!r}" for name in differing)
        now = ", ".join(f"{name}={getattr(settings, name)!r}" for name in differing)
        raise ConfigError(
            f"launched before with {earlier} and now with {now}, but a process has one world: launch once, or call "
            "DistCoordinator().destroy() in between"
        )
    if config is not None and config != _world.config:
        raise ConfigError(
            f"launched before with config={_world.config!r} and now with config={config!r}, but there is one config: "
            "give it at the first launch"
        )
    return True


def _adopt(settings: LaunchSettings, config: Config | None) -> None:
    global _world
    existing = f"rank={dist.get_rank()}, world_size={dist.get_world_size()}, backend={_known_backend()!r}"
    asked = f"rank={settings.rank}, world_size={settings.world_size}, backend={settings.backend!r}"
    if existing != asked:
        raise ConfigError(
            f"torch.distributed is initialized with {existing} and the launch has {asked}: leave out your own "
            "init_process_group, or launch with the same settings"
        )
    local_rank = settings.local_rank
    if local_rank is None:
        stated = os.environ.get("LOCAL_RANK", "")
        local_rank = int(stated) if stated.isdigit() else settings.rank
    set_timeouts(settings.timeouts())
    _world = _World(settings=settings, local_rank=local_rank, config=config, is_ours=False)


def _start(settings: LaunchSettings, config: Config | None) -> None:
    global _world
    rank, world_size, seconds = settings.rank, settings.world_size, settings.setup_timeout_seconds
    settings.check_store_address()
    store = open_store(settings.host, settings.port, rank, world_size, seconds)
    info = RankInfo(
        settings={name: getattr(settings, name) for name in _EQUAL_SETTINGS},
        host=socket.gethostname(),
        address=local_address(settings.host, settings.port) if world_size > 1 else "",
    )
    rendezvous_info = rendezvous(store, rank, info, seconds)
    choose_gloo_interface(rendezvous_info.hosts, rendezvous_info.addresses, rank)
    local_rank = rendezvous_info.local_rank if settings.local_rank is None else settings.local_rank
    device = set_device(local_rank)
    with report_missing_ranks(store, rank, world_size):
        dist.init_process_group(
            settings.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=settings.timeout_seconds),  # all ranks have just arrived
            # Bound to its device, nccl needs no guess at the first barrier and can split groups.
            device_id=device if "nccl" in settings.backend else None,
        )
    set_timeouts(settings.timeouts())
    world = dist.group.WORLD
    assert world is not None
    register_group(world)
    host_group()  # here, where no rank can be at another call
    _world = _World(settings=settings, local_rank=local_rank, config=config, is_ours=True)


def _shutdown_at_exit() -> None:
    if _world is None or _world.process_id != os.getpid() or not dist.is_initialized():
        return  # a forked child is not a rank
    error = getattr(sys, "last_value", None)  # the uncaught exception
    if group_size() > 1:
        shutdown_barrier(error, timeouts().training)
    # After an uncaught error other ranks may never join the collectives that are queued here, and destroying a group
    # waits for those until their timeout.
    if _world.is_ours and error is None:
        destroy_world()


def _known_backend() -> str:
    """Return the backend of the existing process group, or else the default one of this process's device."""
    known = str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else dist.Backend.UNDEFINED
    return default_backend(device_type()) if known == dist.Backend.UNDEFINED else known
