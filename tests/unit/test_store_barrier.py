"""The error-carrying barrier: ranks as threads over every kind of store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from booster.comm import ErrorBarrier, store_barrier
from booster.comm.store_barrier import BarrierRound
from booster.errors import CheckpointError, ConfigError, DesyncError, RankFailedError

PHASE = "'write' of 'save'"


@pytest.fixture(scope="module")
def tcp_stores():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, *(server.clone() for _ in range(3))]


@pytest.fixture(params=["hash", "file", "tcp", "prefix of prefix"])
def stores(request, tmp_path):
    """Four clients of one store."""
    if request.param == "hash":
        return [dist.HashStore()] * 4
    if request.param == "file":
        return [dist.FileStore(str(tmp_path / "store"), 4) for _ in range(4)]
    clients = [dist.PrefixStore(tmp_path.name, client) for client in request.getfixturevalue("tcp_stores")]
    if request.param == "tcp":
        return clients
    return [dist.PrefixStore("a", dist.PrefixStore("b", client)) for client in clients]


def meet(stores, payloads, errors=(), *, is_shared=False, phases=(), delays=(), timeout_seconds=20.0):
    """Returns what each rank, as a thread with a client of its own, got or raised; a payload of None never comes."""

    def rank(number):
        time.sleep(dict(enumerate(delays)).get(number, 0.0))
        phase = dict(enumerate(phases)).get(number, PHASE)
        barrier_round = BarrierRound(stores[number], number, len(payloads), phase, timeout_seconds)
        try:
            return barrier_round.run(payloads[number], dict(enumerate(errors)).get(number), is_shared=is_shared)
        except Exception as error:
            return error

    present = [number for number, payload in enumerate(payloads) if payload is not None]
    with ThreadPoolExecutor(len(present)) as pool:
        results = dict(zip(present, pool.map(rank, present), strict=True))
    return [results.get(number) for number in range(len(payloads))]


def test_rank_0_gets_every_payload_and_no_key_stays(stores):
    before = stores[0].num_keys()
    payloads = [b"", b"\x00\xff\n{}", b"x" * 3]
    assert meet(stores, payloads) == [(payloads, b""), ([], b""), ([], b"")]
    assert stores[0].num_keys() == before


def test_what_rank_0_shares_reaches_all(stores):
    before = stores[0].num_keys()
    results = meet(stores, [b"\n\x00plan", b"ignored", b""], is_shared=True)
    assert [shared for _, shared in results] == [b"\n\x00plan"] * 3
    assert stores[0].num_keys() == before


@pytest.mark.parametrize("size", [7, 8, 9, 16, 17])
@pytest.mark.parametrize("is_shared", [False, True])
def test_payloads_of_any_size_travel_in_chunks(stores, monkeypatch, size, is_shared):
    monkeypatch.setattr(store_barrier, "_CHUNK_BYTES", 8)
    before = stores[0].num_keys()
    payloads = [bytes(range(size)), bytes(range(size))[::-1]]
    results = meet(stores, payloads, is_shared=is_shared)
    assert results == ([([], payloads[0])] * 2 if is_shared else [(payloads, b""), ([], b"")])
    assert stores[0].num_keys() == before


@pytest.mark.parametrize("is_shared", [False, True])
def test_more_than_a_tcp_store_takes_at_once(tcp_stores, is_shared):
    payload = bytes(9 * 2**20)
    results = meet(tcp_stores, [payload, payload], is_shared=is_shared)
    assert all(shared == (payload if is_shared else b"") for _, shared in results)
    assert results[0][0] == ([] if is_shared else [payload, payload])


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_on_all(stores, failing, is_shared):
    before = stores[0].num_keys()
    error = CheckpointError("disk full")
    errors = [error if rank == failing else None for rank in range(3)]
    results = meet(stores, [b"a", b"b", b"c"], errors, is_shared=is_shared)
    assert results[failing] is error
    for result in results[:failing] + results[failing + 1 :]:
        assert type(result) is CheckpointError
        assert str(result) == f"rank {failing} failed at {PHASE}, so all ranks stop: disk full"
    assert stores[0].num_keys() == before


class _OwnError(CheckpointError):
    """A class that the other ranks may not know."""


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (ConfigError("no"), ConfigError, "no"),
        (_OwnError("no"), CheckpointError, "no"),
        (OSError(28, "No space left on device", "/x"), RankFailedError, "No space left on device: '/x'"),
        (ValueError("odd \udcff\u2028 text"), RankFailedError, "ValueError: odd \udcff\u2028 text"),
        (ZeroDivisionError(), RankFailedError, "ZeroDivisionError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_class_and_the_text_travel(error, expected, text):
    theirs = meet([dist.HashStore()] * 4, [b"", b""], [None, error])[0]
    assert type(theirs) is expected
    assert text in str(theirs)


def test_of_several_failures_the_first_is_told_and_the_others_counted():
    errors = [None, ConfigError("one"), OSError("two"), ConfigError("three")]
    results = meet([dist.HashStore()] * 4, [b""] * 4, errors)
    assert results[1:] == errors[1:]
    assert type(results[0]) is ConfigError
    assert "rank 1 failed (and 2 more ranks)" in str(results[0])


def test_a_long_text_is_cut():
    (theirs, _) = meet([dist.HashStore()] * 4, [b"", b""], [None, ValueError("x" * 10**6)])
    assert len(str(theirs)) < 5000


@pytest.mark.parametrize("missing", [(0,), (1,), (2, 3), (0, 3)], ids=str)
def test_ranks_that_never_come_are_named_on_all_others(stores, missing):
    payloads = [None if rank in missing else b"" for rank in range(4)]
    results = meet(stores, payloads, timeout_seconds=0.2)
    named = f"rank {missing[0]} " if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} "
    for rank, result in enumerate(results):
        if rank not in missing:
            assert type(result) is RankFailedError
            assert str(result).startswith(named + f"did not complete {PHASE} within 0.2 s")


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_stops_too(late):
    """It must not go on alone where the others gave up, whichever of them is rank 0."""
    delays = [0.5 if rank == late else 0.0 for rank in range(3)]
    results = meet([dist.HashStore()] * 4, [b""] * 3, delays=delays, timeout_seconds=0.1)
    assert [type(result) for result in results] == [RankFailedError] * 3
    assert all(str(result).startswith(f"rank {late} did not") for result in results)


def test_its_own_error_goes_first_after_a_timeout():
    error = ConfigError("mine")
    results = meet([dist.HashStore()] * 4, [b"", b"", None], [None, error], timeout_seconds=0.1)
    assert results[1] is error
    assert "rank 2 did not" in str(results[0])


def test_ranks_at_different_phases_are_told_so(stores):
    results = meet(stores, [b"", b"", b""], phases=["'a' of 'x'", "'a' of 'x'", "'b' of 'x'"])
    assert [type(result) for result in results] == [DesyncError] * 3
    assert "rank 2 is at 'b' of 'x' and rank 0 at 'a' of 'x'" in str(results[1])


def test_many_rounds_at_once_on_one_client(stores):
    """Two threads of each rank share a store; no thread waits inside of it."""
    results = {}

    def hold(name, rank):
        barrier_round = BarrierRound(dist.PrefixStore(name, stores[rank]), rank, 2, PHASE, 20.0)
        results[name, rank] = barrier_round.run(name.encode(), None, is_shared=False)

    threads = [threading.Thread(target=hold, args=(name, rank)) for rank in range(2) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {name: results[name, 0][0] for name in "abcdefgh"} == {name: [name.encode()] * 2 for name in "abcdefgh"}


def test_a_world_of_one_needs_no_store():
    barrier = ErrorBarrier(name="save")
    assert barrier.gather("write", b"x") == [b"x"]
    assert barrier.share("plan", b"y") == b"y"
    assert barrier.share("plan") == b""
    error = OSError("mine")
    for method in (barrier.gather, barrier.share):
        with pytest.raises(OSError, match="mine") as caught:
            method("write", b"", error)
        assert caught.value is error
