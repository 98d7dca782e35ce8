"""The counter counts calls and bytes as theory has them."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import distributed

from booster.comm import (
    all_gather_equal,
    all_reduce_max,
    all_reduce_numbers,
    all_reduce_sum,
    barrier,
    broadcast,
    count_communication,
    new_cpu_group,
    raise_on_all_ranks,
    receive,
    receive_tensor,
    send,
    send_tensor,
    start_all_gather,
    start_reduce_scatter,
)
from booster.device import current_device

pytestmark = pytest.mark.on_device

NUMEL = 1200  # of a whole fp32 buffer; every world size below divides it


def ones(*shape, **options):
    return torch.ones(*shape, **options, device=current_device())


@distributed([1, 2, 3, 4])
def test_flat_collectives_move_what_theory_asks_for(world_size):
    with count_communication() as count:
        for _ in range(3):
            start_reduce_scatter(ones(NUMEL)).wait(ones(NUMEL // world_size), accumulate=False)
        start_all_gather(ones(NUMEL, dtype=torch.bfloat16)).wait()
    share = (world_size - 1) / world_size
    expected = {"reduce_scatter": round(3 * 4 * NUMEL * share), "all_gather": round(2 * NUMEL * share)}
    assert +count.sent == +count.received == +Counter(expected)
    assert count.calls == (Counter() if world_size == 1 else Counter(reduce_scatter=3, all_gather=1))


@distributed([2, 4])
def test_the_other_collectives(world_size):
    is_source = dist.get_rank() == 1
    with count_communication() as count:
        all_reduce_numbers([1.0, 2.0])
        all_reduce_sum(ones(10))
        all_reduce_max(ones(8, dtype=torch.uint8))
        barrier()
        all_gather_equal(ones(5))
        broadcast([ones(6), ones(0), ones(7)], source=1)
    reduced = sum(2 * (world_size - 1) * size // world_size for size in (16, 40, 8, 40))
    assert count.calls == Counter(all_reduce=4, all_gather=1, broadcast=2)
    assert +count.sent == +Counter(
        all_reduce=reduced, all_gather=20 * (world_size - 1), broadcast=52 if is_source else 0
    )
    assert +count.received == +Counter(
        all_reduce=reduced, all_gather=20 * (world_size - 1), broadcast=0 if is_source else 52
    )


@distributed(2)
def test_messages_count_their_payload():
    group = dist.group.WORLD
    with count_communication() as count:
        if dist.get_rank() == 0:
            send(ones(10), 1, group)
            send_tensor(ones(3, 4, dtype=torch.float64), 1)
            send_tensor(ones(0), 1)
        else:
            receive(ones(10), 0, group)
            receive_tensor(0)
            receive_tensor(0)
    ours, theirs = ("send", "receive") if dist.get_rank() == 0 else ("receive", "send")
    assert count.calls == Counter({ours: 3})
    moved = count.sent if ours == "send" else count.received
    assert moved[ours] == 40 + 96
    assert +count.sent + +count.received == Counter({ours: 136})
    assert count.calls[theirs] == 0


@distributed(2)
def test_counts_nest_and_end():
    with count_communication() as outer:
        barrier()
        with count_communication() as inner:
            barrier()
        barrier()
    barrier()
    assert outer.calls == Counter(all_reduce=3)
    assert inner.calls == Counter(all_reduce=1)


@distributed(2)
def test_a_count_ends_with_an_error():
    error = ValueError("boom") if dist.get_rank() == 0 else None
    with pytest.raises(Exception, match="boom"), count_communication() as count:
        raise_on_all_ranks(error)
    calls = Counter(count.calls)
    barrier()
    assert count.calls == calls
    assert calls["all_reduce"] == 1


@distributed(2)
def test_threads_are_counted():
    group = new_cpu_group()
    thread = threading.Thread(target=lambda: [all_reduce_numbers([1.0], group) for _ in range(50)])
    with count_communication() as count:
        thread.start()
        for _ in range(50):
            all_reduce_numbers([1.0])
        thread.join()
    assert count.calls == Counter(all_reduce=100)
    assert count.sent == Counter(all_reduce=800)
