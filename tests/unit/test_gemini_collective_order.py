"""Collective order: all ranks receive all requests, and ranks in different passes raise together."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist
from harness import distributed, run_ranks

from booster import DesyncError
from booster.comm import count_communication
from booster.plugins.sharding.collective_order import OrderNegotiation, PassKind, RankRequest

MAX_REQUESTS = 4


def random_post(generator):
    return RankRequest(
        phase=generator.choice(list(PassKind)),
        gather_requests=tuple(generator.sample(range(10_000), generator.randrange(MAX_REQUESTS + 1))),
        num_ready=generator.randrange(2**40),
        is_done=generator.random() < 0.3,
        has_late_grads=generator.random() < 0.5,
    )


def test_who_is_alone_hears_itself():
    negotiation = OrderNegotiation(None, MAX_REQUESTS)
    assert negotiation.max_gather_requests == MAX_REQUESTS
    generator = random.Random(0)
    for _ in range(100):
        request = random_post(generator)
        assert negotiation.exchange(request) == [request]


def _exchange_random_requests(seed, count):
    """Every rank knows what every other will say."""
    negotiation, rank, size = OrderNegotiation(None, MAX_REQUESTS), dist.get_rank(), dist.get_world_size()
    generator = random.Random(seed)
    for _ in range(count):
        requests = [random_post(generator) for _ in range(size)]
        if all(request.is_done for request in requests):
            continue
        assert negotiation.exchange(requests[rank]) == requests


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_posts_travel(seed, world_size):
    run_ranks(_exchange_random_requests, world_size, seed, 100)


@distributed(world_size=[2, 3])
def test_chunk_zero_can_be_wanted_and_nothing_can():
    rank = dist.get_rank()
    requests = OrderNegotiation(None, MAX_REQUESTS).exchange(
        RankRequest(phase=PassKind.FORWARD, gather_requests=() if rank else (0,))
    )
    assert [request.gather_requests for request in requests] == [(0,)] + [()] * (len(requests) - 1)


@distributed(world_size=2)
def test_the_most_urgent_wishes_are_heard_where_there_are_too_many():
    wants = tuple(range(10, 0, -1))
    requests = OrderNegotiation(None, MAX_REQUESTS).exchange(
        RankRequest(phase=PassKind.BACKWARD, gather_requests=wants)
    )
    assert [request.gather_requests for request in requests] == [wants[:MAX_REQUESTS]] * 2


@distributed(world_size=2)
def test_a_model_without_chunks_can_meet():
    requests = OrderNegotiation(None, 0).exchange(RankRequest(phase=PassKind.FORWARD, num_ready=dist.get_rank()))
    assert [request.num_ready for request in requests] == [0, 1]


@distributed(world_size=3)
def test_a_negotiation_is_one_small_message():
    negotiation = OrderNegotiation(None, MAX_REQUESTS)
    negotiation.exchange(RankRequest(phase=PassKind.FORWARD))
    with count_communication() as count:
        negotiation.exchange(RankRequest(phase=PassKind.BACKWARD, gather_requests=(1, 2), num_ready=7))
    assert sum(count.calls.values()) == 1
    assert sum(count.sent.values()) <= 200


# Ends.


def _close(phases):
    """Returns this rank's error when each rank ends the phase that it is told to."""
    request = RankRequest(phase=phases[dist.get_rank()], is_done=True)
    try:
        requests = OrderNegotiation(None, MAX_REQUESTS).exchange(request)
    except DesyncError as error:
        return str(error)
    assert [one.phase for one in requests] == list(phases)
    return None


FORWARD, BACKWARD = PassKind.FORWARD, PassKind.BACKWARD


@pytest.mark.parametrize("phases", [(FORWARD, FORWARD), (BACKWARD, BACKWARD), (BACKWARD,) * 3])
def test_ranks_may_end_the_same_phase(phases):
    assert run_ranks(_close, len(phases), phases) == [None] * len(phases)


@pytest.mark.parametrize(
    "phases",
    [
        (FORWARD, BACKWARD),
        (BACKWARD, FORWARD),
        (FORWARD, BACKWARD, FORWARD),
        (BACKWARD, FORWARD, BACKWARD),
        (BACKWARD, BACKWARD, FORWARD),
    ],
)
def test_ends_of_different_phases_raise_on_all_ranks(phases):
    errors = run_ranks(_close, len(phases), phases)
    behind = [rank for rank, phase in enumerate(phases) if phase is BACKWARD]
    for error in errors:
        assert error.startswith(f"ranks {behind} have finished a backward while the others have finished a forward")
        assert "every rank must call the model and backward() equally often and in the same order" in error


@distributed(world_size=3)
def test_one_rank_may_still_be_in_another_phase():
    """It has not come to an end, and may yet come to the same one."""
    rank = dist.get_rank()
    request = RankRequest(phase=BACKWARD if rank == 1 else FORWARD, is_done=rank != 1)
    requests = OrderNegotiation(None, MAX_REQUESTS).exchange(request)
    assert [one.is_done for one in requests] == [True, False, True]


@distributed(world_size=4)
def test_a_group_speaks_of_world_ranks():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    negotiation = OrderNegotiation(groups[rank % 2], MAX_REQUESTS)
    assert [request.num_ready for request in negotiation.exchange(RankRequest(phase=FORWARD, num_ready=rank))] == [
        rank % 2,
        rank % 2 + 2,
    ]
    with pytest.raises(DesyncError, match=rf"^ranks \[{rank % 2 + 2}\] have finished a backward"):
        negotiation.exchange(RankRequest(phase=BACKWARD if rank >= 2 else FORWARD, is_done=True))
