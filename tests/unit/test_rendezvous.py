"""Rendezvous of the ranks, with threads as ranks and a store in memory."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch.distributed as dist

from booster.errors import ConfigError, RankFailedError
from booster.launch.rendezvous import RankInfo, open_store, rendezvous


def card(**changed):
    own = {name: changed.pop(name) for name in ("host", "address") if name in changed}
    limits = {"timeout_seconds": 600, "setup_timeout_seconds": 1800, "checkpoint_timeout_seconds": 1800}
    return RankInfo(settings={"world_size": 3, "backend": "gloo", "seed": 1} | limits | changed, **{"host": "a"} | own)


def meet_all(cards):
    store = dist.HashStore()
    with ThreadPoolExecutor(len(cards)) as pool:
        return [pool.submit(rendezvous, store, rank, shown, 20) for rank, shown in enumerate(cards)]


@contextmanager
def free_port():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    yield port


def test_local_ranks_are_counted_by_host():
    waiting = meet_all([card(host=host) for host in "aba"])
    assert [future.result().local_rank for future in waiting] == [0, 0, 1]


def test_everybody_learns_where_the_others_are():
    for future in meet_all([card(address="10.0.0.1"), card(host="b"), card(address="10.0.0.1")]):
        assert future.result().hosts == ["a", "b", "a"]
        assert future.result().addresses == ["10.0.0.1", "", "10.0.0.1"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 2}, "seed=1 and rank 2 with seed=2"),
        ({"backend": "nccl"}, "backend='gloo' and rank 2 with backend='nccl'"),
        ({"timeout_seconds": 10}, "timeout_seconds=600 and rank 2 with timeout_seconds=10"),
        ({"setup_timeout_seconds": 10.5}, "setup_timeout_seconds=1800 and rank 2 with setup_timeout_seconds=10.5"),
        ({"checkpoint_timeout_seconds": 9}, "rank 2 with checkpoint_timeout_seconds=9, but all ranks form one world"),
    ],
)
def test_different_settings_raise_on_every_rank(changed, message):
    for future in meet_all([card(), card(), card(**changed)]):
        with pytest.raises(ConfigError, match=message):
            future.result()


def test_the_same_seconds_may_be_written_in_two_ways():
    first, second = meet_all([card(world_size=2, timeout_seconds=seconds) for seconds in (600, 600.0)])
    assert first.result().hosts == second.result().hosts


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set("card/2", json.dumps(asdict(card())))
    with pytest.raises(RankFailedError, match=r"rank\(s\) \[1\] of world_size=3"):
        rendezvous(store, 0, card(), 0.1)


def test_restarts_and_launches_have_keys_of_their_own(monkeypatch):
    server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    first, second = (open_store("localhost", server.port, 0, 2, 5) for _ in range(2))
    first.set("key", "value")
    assert not second.check(["key"])
    assert any("attempt_4" in str(key) for key in server.list_keys())


def test_a_taken_port_is_a_clear_error():
    server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=f"cannot serve at port={server.port}"):
        open_store("localhost", server.port, 0, 2, 5)


def test_a_host_that_is_not_rank_0s_own_is_a_clear_error():
    with free_port() as port, pytest.raises(ConfigError, match=r"cannot reach it at name.invalid:\d+ within 1 s"):
        open_store("name.invalid", port, 0, 2, 1)
