"""Bytes from every rank to every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed

from booster.comm import all_gather_bytes, new_cpu_group, receive, send

pytestmark = pytest.mark.on_device


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("same", [True, False])
def test_equal_payloads_are_one(world_size, same):
    mine = b"all" if same else b"%d" % dist.get_rank() * (1 + dist.get_rank())
    payloads, index = all_gather_bytes(mine)
    expected = [b"all" if same else b"%d" % rank * (1 + rank) for rank in range(world_size)]
    assert [payloads[i] for i in index] == expected
    assert len(payloads) == (1 if same else world_size)


@distributed(world_size=3)
def test_an_empty_payload_and_a_long_one():
    mine = [b"", b"x" * 100_000, b""][dist.get_rank()]
    payloads, index = all_gather_bytes(mine)
    assert payloads == [b"", b"x" * 100_000]
    assert index == [0, 1, 0]


@distributed(world_size=4)
def test_many_different_payloads_take_one_all_gather():
    from booster.comm import collectives as exchange

    limit, exchange._MAX_BROADCASTS = exchange._MAX_BROADCASTS, 2
    try:
        payloads, index = all_gather_bytes(b"ab" * dist.get_rank())
    finally:
        exchange._MAX_BROADCASTS = limit
    assert [payloads[i] for i in index] == [b"", b"ab", b"abab", b"ababab"]


@distributed(world_size=3)
def test_a_group_beside_the_training():
    world = new_cpu_group()
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        group, rank = new_cpu_group(pair), dist.get_group_rank(pair, dist.get_rank())
        tensor = torch.full((5,), 7.0 if rank == 0 else 0.0)
        send(tensor, 1, group) if rank == 0 else receive(tensor, 0, group)
        assert tensor.tolist() == [7.0] * 5
    dist.barrier(world)
