"""An error while ranks connect names those that are not there."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from booster.errors import RankFailedError
from booster.launch import rendezvous
from booster.launch.rendezvous import report_missing_ranks


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.1)


def fail(store, rank: int, world_size: int, text: str = "wait timeout after 20000ms") -> str:
    with pytest.raises(RankFailedError) as caught, report_missing_ranks(store, rank, world_size):
        raise dist.DistStoreError(f"{text}\nand a stack")
    return str(caught.value)


def test_the_ranks_that_gave_no_sign_are_named():
    store = dist.HashStore()
    with report_missing_ranks(store, 2, 5):
        pass
    store.set("joined/3", "failed")
    text = fail(store, 0, 5)
    assert "ranks 1, 4 did not report" in text
    assert text.endswith("torch reports: wait timeout after 20000ms")


def test_one_that_is_missing():
    store = dist.HashStore()
    store.set("joined/0", "failed")
    assert "rank 1 did not report" in fail(store, 2, 3)


def test_all_are_there_and_the_network_between_them_fails():
    store = dist.HashStore()
    store.set("joined/0", "failed")
    assert "no rank is missing" in fail(store, 1, 2)


class LostStore:
    def __init__(self):
        self.told = []

    def set(self, key, value):
        self.told.append((key, value))
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_was_rank_0s():
    assert "rank 0, whose process serves the store, has ended" in fail(LostStore(), 1, 2)


def test_a_store_that_is_gone_afterwards_is_no_error_here():
    store = LostStore()
    with report_missing_ranks(store, 1, 2):
        pass
    assert store.told == [("joined/1", "joined")]


def test_a_users_mistake_stays_what_it_is():
    with pytest.raises(ValueError, match="backend"), report_missing_ranks(dist.HashStore(), 0, 2):
        raise ValueError("no such backend")
