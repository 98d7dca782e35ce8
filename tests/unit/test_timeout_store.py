"""A store that does not answer is given up, and asked nothing more until it does."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from booster.fault_tolerance import store as bounded_store
from booster.fault_tolerance.store import TimeoutStore

SECONDS = 0.2


@pytest.fixture
def store():
    return TimeoutStore(dist.HashStore(), "here", 30.0)


def test_it_is_a_store_under_a_prefix(store):
    store.set("a", "1")
    store.append("a", "2")
    part = store.under("part")
    part.set("a", b"other")
    assert (store.get("a"), part.get("a"), store.get("part/a")) == (b"12", b"other", b"other")
    assert store.check(["a", "part/a"])
    assert not store.check(["a", "b"])
    store.compare_set("b", "", "first")
    store.compare_set("b", "", "second")
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    assert store.has_extended_api()
    assert store.multi_get(["a", "b"]) == [b"12", b"first"]
    store.delete_key("b")
    assert not store.check(["b"])


def test_what_the_store_raises_is_raised_here(store):
    with pytest.raises(TypeError):
        store.set("a", object())


def test_a_store_that_does_not_answer_is_given_up(monkeypatch):
    client = dist.HashStore()
    silent, other = TimeoutStore(client, "here", SECONDS), TimeoutStore(dist.HashStore(), "here", 30.0)
    stays_away = threading.Event()
    monkeypatch.setattr(silent, "_store", type("Stopped", (), {"check": lambda *_: stays_away.wait(60)})())
    try:
        begin = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match=r"did not answer within 0\.2 s"):
            silent.check(["a"])
        assert time.monotonic() - begin < 30
        monkeypatch.setattr(bounded_store._PendingCall, "start", lambda _: pytest.fail("it was asked again"))
        with pytest.raises(dist.DistNetworkError, match=r"did not answer"):
            silent.under("part").set("a", "1")  # by the same client, whose lock the lost thread holds
        monkeypatch.undo()
        other.set("a", "1")
        assert other.check(["a"])
    finally:
        stays_away.set()
    bounded_store._hung_clients[client].join(30)
    silent.under("part").set("a", "1")  # the answer came late
    assert silent.under("part").check(["a"])
