"""The error-carrying barrier with real ranks, beside collectives, in threads and in subgroups."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, distributed, run_ranks

from booster.comm import ErrorBarrier
from booster.device import current_device
from booster.errors import CheckpointError, RankFailedError

pytestmark = pytest.mark.on_device


def _num_keys():
    return dist.distributed_c10d._get_default_store().num_keys()


@distributed(3)
def test_an_error_on_one_rank_reaches_all():
    rank = dist.get_rank()
    barrier = ErrorBarrier(name="test")
    error = CheckpointError("disk full") if rank == 1 else None
    with pytest.raises(CheckpointError, match="disk full") as caught:
        barrier.gather("write", b"", error)
    assert (caught.value is error) is (rank == 1)
    if rank != 1:
        assert str(caught.value) == "rank 1 failed at 'write' of 'test', so all ranks stop: disk full"
    # It can be used on: the ranks are still together.
    payloads = barrier.gather("clear", str(rank).encode())
    assert payloads == ([b"0", b"1", b"2"] if rank == 0 else [])
    assert barrier.share("result", b"done" if rank == 0 else None) == b"done"


@distributed(3)
def test_a_missing_rank_is_named():
    dist.barrier()
    if dist.get_rank() != 2:
        with pytest.raises(RankFailedError, match=r"^rank 2 did not complete 'write' of 'test' within 1 s"):
            ErrorBarrier(name="test", timeout_seconds=1).gather("write")


def _wait_for_a_killed_rank() -> str:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    ErrorBarrier(name="test", timeout_seconds=1).gather("write")
    return ""


def test_a_killed_rank_is_named():
    with pytest.raises(RanksFailed, match=r"rank 2 did not complete 'write' of 'test' within 1 s"):
        run_ranks(_wait_for_a_killed_rank, 3, fresh=True)


@distributed(2)
def test_two_hundred_phases_leave_no_keys():
    barrier = ErrorBarrier(name="test")
    dist.barrier()
    before = _num_keys()
    dist.barrier()
    for step in range(200):
        payload = f"{dist.get_rank()} at {step}".encode()
        payloads = barrier.gather("step", payload)
        assert payloads == ([f"0 at {step}".encode(), f"1 at {step}".encode()] if dist.get_rank() == 0 else [])
    dist.barrier()
    assert _num_keys() == before


@distributed(2)
def test_a_name_may_be_used_again():
    for use in range(5):
        barrier = ErrorBarrier(name="test")
        assert barrier.share("plan", str(use).encode()) == str(use).encode()


@distributed(3)
def test_two_threads_beside_collectives():
    rank = dist.get_rank()
    results = {}

    def work(name, pause):
        barrier = ErrorBarrier(name=name, timeout_seconds=30)
        for step in range(20):
            time.sleep(pause * rank)
            results[name, step] = barrier.share("step", f"{name}{step}".encode())

    threads = [threading.Thread(target=work, args=arguments) for arguments in (("a", 0.001), ("b", 0.003))]
    for thread in threads:
        thread.start()
    total = torch.zeros(1, device=current_device())
    for _ in range(50):
        total += 1
        dist.all_reduce(total)
        total /= dist.get_world_size()
    for thread in threads:
        thread.join(30)
    assert total.item() == pytest.approx(50)
    assert results == {(name, step): f"{name}{step}".encode() for name in "ab" for step in range(20)}


@distributed(4)
def test_subgroups_count_their_own_ranks():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    barrier = ErrorBarrier(group, name="test", timeout_seconds=20)
    payloads = barrier.gather("write", str(rank).encode())
    assert payloads == ([[b"0", b"2"], [b"1", b"3"]][rank] if rank < 2 else [])
    error = OSError("mine") if rank == 3 else None
    if rank % 2 == 0:
        barrier.gather("sync", b"", error)
    else:
        with pytest.raises((OSError, RankFailedError), match="mine") as caught:
            barrier.gather("sync", b"", error)
        assert rank == 3 or str(caught.value).startswith("rank 1 failed at 'sync'")


@distributed(2)
def test_a_group_may_be_built_while_a_thread_waits():
    """A wait inside of the store would hold the client that building a group needs, until its timeout."""
    rank = dist.get_rank()
    result = []
    barrier = ErrorBarrier(name="test", timeout_seconds=30)
    wait = threading.Thread(target=lambda: result.append(barrier.share("late", b"x")))
    if rank == 0:
        wait.start()
    group = dist.new_group([0, 1])
    dist.barrier(group)
    if rank == 1:
        wait.start()
    wait.join(30)
    assert result == [b"x"]
