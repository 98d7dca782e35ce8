"""Rendezvous of the ranks of one launch: the store, and the comparison of their settings."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # no __all__ there
from torch.distributed.distributed_c10d import PrefixStore, Store

from booster.errors import BoosterError, ConfigError, RankFailedError, first_line

# torch's elastic launcher keeps its store over a restart of the ranks, with the addresses of the dead ones in it, and
# init_method="env://" reads those. Separate keys per attempt, and per launch within a process (a script may destroy its
# group and launch again), keep each world apart.
_num_opened = 0

_ATTEMPT_SECONDS = 3.0  # timeout of one connection attempt, for lost packets
_PAUSE_SECONDS = 0.05
_GRACE_SECONDS = 5  # the others wait longer than rank 0, so that its verdict, which names the late ranks, comes first


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank at the rendezvous.

    Attributes:
        settings: Settings that must be equal on every rank, by name, among them `world_size`.
        host: Host name, from which local ranks are counted if they are unknown.
        address: Address of the host on the route to the store, "" if unknown.
    """

    settings: Mapping[str, Any]
    host: str
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousInfo:
    """Index of this rank among those on the same host, and host and address of every rank."""

    local_rank: int
    hosts: list[str]
    addresses: list[str]


def open_store(host: str, port: int, rank: int, world_size: int, timeout_seconds: float) -> Store:
    """Return the store of this launch; a world of one needs neither host nor port.

    Rank 0 serves it, unless torch's elastic launcher does. Collective: every rank must call it; the others wait for the
    server up to the timeout.

    Raises:
        ConfigError: Rank 0 cannot serve at that port, or the host is another one.
        RankFailedError: The server is not reachable in time.
    """
    global _num_opened
    _num_opened += 1
    prefix = f"booster/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/launch_{_num_opened}"
    if world_size == 1:
        return PrefixStore(prefix, HashStore())
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if not serves:
            _wait_for_server(host, port, timeout_seconds)
        store = TCPStore(host, port, world_size, serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    except (dist.DistError, OSError) as error:
        raise _connection_error(host, port, rank, serves, timeout_seconds, error) from error
    return PrefixStore(prefix, store)


def rendezvous(store: Store, rank: int, info: RankInfo, timeout_seconds: float) -> RendezvousInfo:
    """Wait for every rank, compare their settings, and return the hosts and addresses of all.

    Collective: every rank must call it.

    Raises:
        ConfigError: The ranks were launched with different settings; on every rank.
        RankFailedError: A rank is too late: the message names it.
    """
    world_size = int(info.settings["world_size"])
    store.set(f"card/{rank}", json.dumps(asdict(info)))
    if rank == 0:
        store.set("verdict", json.dumps(_compare(store, world_size, timeout_seconds)))
    try:
        store.wait(["verdict"], timedelta(seconds=timeout_seconds + _GRACE_SECONDS))
        outcome = json.loads(store.get("verdict"))
    except dist.DistError as error:
        raise RankFailedError(
            f"rank {rank} waited {timeout_seconds:g} s at the launch for rank 0 to see all {world_size} ranks, "
            "which did not happen: check rank 0's output, or allow more time with setup_timeout_seconds=..."
        ) from error
    if outcome["missing"]:
        raise RankFailedError(
            f"rank(s) {outcome['missing']} of world_size={world_size} did not join the launch within"
            f" {timeout_seconds:g} s: check why they did not start, or allow more time with setup_timeout_seconds=..."
        )
    if outcome["difference"]:
        raise ConfigError(outcome["difference"])
    hosts: list[str] = outcome["hosts"]
    return RendezvousInfo(local_rank=hosts[:rank].count(hosts[rank]), hosts=hosts, addresses=outcome["addresses"])


def _wait_for_server(host: str, port: int, timeout_seconds: float) -> None:
    """Wait for a listening server. torch's client backs off far beyond its own timeout.

    Raises:
        OSError: No server listened in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=_ATTEMPT_SECONDS).close()
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


def _compare(store: Store, world_size: int, timeout_seconds: float) -> dict[str, object]:
    keys = [f"card/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except dist.DistStoreError:  # the timeout: collect the late ranks for the errors of the others
        return {"missing": [rank for rank, key in enumerate(keys) if not store.check([key])]}
    infos = [RankInfo(**json.loads(store.get(key))) for key in keys]
    return {
        "missing": [],
        "difference": _first_difference(infos),
        "hosts": [info.host for info in infos],
        "addresses": [info.address for info in infos],
    }


def _first_difference(infos: list[RankInfo]) -> str | None:
    for rank, info in enumerate(infos):
        for name, first in infos[0].settings.items():
            other = info.settings.get(name)
            if other != first:
                return (
                    f"rank 0 was launched with {name}={first!r} and rank {rank} with {name}={other!r}, "
                    "but all ranks form one world: launch them with the same settings"
                )
    return None


def _connection_error(
    host: str, port: int, rank: int, serves: bool, timeout_seconds: float, error: Exception
) -> BoosterError:
    if serves and "failed to listen" not in str(error):
        return ConfigError(
            f"rank 0 serves the store on {socket.gethostname()}, but cannot reach it at {host}:{port} within "
            f"{timeout_seconds:g} s ({first_line(error)}): give the address of rank 0's host as host"
        )
    if serves:
        return ConfigError(
            f"rank 0 cannot serve at port={port} of this host ({first_line(error)}): choose a free port, equal on all "
            "ranks"
        )
    return RankFailedError(
        f"rank {rank} on {socket.gethostname()} could not reach the store at {host}:{port} within "
        f"{timeout_seconds:g} s ({first_line(error)}): check that rank 0 runs there and the port is open"
    )


_REPORT_SECONDS = 3.0
_RETRY_SECONDS = 0.02


@contextmanager
def report_missing_ranks(store: Store, rank: int, world_size: int) -> Iterator[None]:
    """Name the ranks that neither completed the block nor reported a failure, in errors of the block.

    Collective: every rank must enter it.

    Raises:
        RankFailedError: In place of any RuntimeError, which torch raises for lost and late ranks here.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError(
            f"rank {rank} could not connect with all ranks at the launch: {_missing_ranks(store, rank, world_size)};"
            f" torch reports: {first_line(error)}"
        ) from error
    if world_size > 1:
        with suppress(RuntimeError):  # rank 0 and its store are gone: the next collective raises
            store.set(f"joined/{rank}", "joined")


def _missing_ranks(store: Store, rank: int, world_size: int) -> str:
    try:
        store.set(f"joined/{rank}", "failed")
        waiting = _wait_for_others(store, world_size)
    except RuntimeError:  # the store is gone
        return "rank 0, whose process serves the store, has ended, or its host cannot be reached any more"
    if not waiting:
        return "no rank is missing: check the output of the other ranks, and the network between them"
    names = f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}"
    return (
        f"{names} did not report, though present at the rendezvous: see the log there, whether it was killed or hangs"
    )


def _wait_for_others(store: Store, world_size: int) -> list[int]:
    """Return the ranks that reported neither success nor failure within _REPORT_SECONDS."""
    deadline = time.monotonic() + _REPORT_SECONDS
    waiting = list(range(world_size))
    while waiting and time.monotonic() < deadline:
        waiting = [rank for rank in waiting if not store.check([f"joined/{rank}"])]
        time.sleep(_RETRY_SECONDS)
    return waiting
