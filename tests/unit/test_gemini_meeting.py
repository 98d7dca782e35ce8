"""Meetings: what every rank says reaches all of them, and ranks that end different phases learn it together."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist
from harness import distributed, run_ranks

from booster import DesyncError
from booster.comm import count_communication
from booster.plugins.gemini.collective_order import OrderNegotiation, PassKind, RankRequest

MAX_WANTS = 4


def random_post(generator):
    return RankRequest(
        phase=generator.choice(list(PassKind)),
        gather_requests=tuple(generator.sample(range(10_000), generator.randrange(MAX_WANTS + 1))),
        num_ready=generator.randrange(2**40),
        is_done=generator.random() < 0.3,
        has_late_grads=generator.random() < 0.5,
    )


def test_who_is_alone_hears_itself():
    meeting = OrderNegotiation(None, MAX_WANTS)
    assert meeting.is_single_rank
    assert meeting.max_gather_requests == MAX_WANTS
    generator = random.Random(0)
    for _ in range(100):
        post = random_post(generator)
        assert meeting.exchange(post) == [post]


def _hold_random_meetings(seed, count):
    """Every rank knows what every other will say."""
    meeting, rank, size = OrderNegotiation(None, MAX_WANTS), dist.get_rank(), dist.get_world_size()
    assert not meeting.is_single_rank
    generator = random.Random(seed)
    for _ in range(count):
        posts = [random_post(generator) for _ in range(size)]
        if all(post.is_done for post in posts):
            continue
        assert meeting.exchange(posts[rank]) == posts


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_posts_travel(seed, world_size):
    run_ranks(_hold_random_meetings, world_size, seed, 100)


@distributed(world_size=[2, 3])
def test_chunk_zero_can_be_wanted_and_nothing_can():
    rank = dist.get_rank()
    posts = OrderNegotiation(None, MAX_WANTS).exchange(
        RankRequest(phase=PassKind.FORWARD, gather_requests=() if rank else (0,))
    )
    assert [post.gather_requests for post in posts] == [(0,)] + [()] * (len(posts) - 1)


@distributed(world_size=2)
def test_the_most_urgent_wishes_are_heard_where_there_are_too_many():
    wants = tuple(range(10, 0, -1))
    posts = OrderNegotiation(None, MAX_WANTS).exchange(RankRequest(phase=PassKind.BACKWARD, gather_requests=wants))
    assert [post.gather_requests for post in posts] == [wants[:MAX_WANTS]] * 2


@distributed(world_size=2)
def test_a_model_without_chunks_can_meet():
    posts = OrderNegotiation(None, 0).exchange(RankRequest(phase=PassKind.FORWARD, num_ready=dist.get_rank()))
    assert [post.num_ready for post in posts] == [0, 1]


@distributed(world_size=3)
def test_a_meeting_is_one_small_message():
    meeting = OrderNegotiation(None, MAX_WANTS)
    meeting.exchange(RankRequest(phase=PassKind.FORWARD))
    with count_communication() as count:
        meeting.exchange(RankRequest(phase=PassKind.BACKWARD, gather_requests=(1, 2), num_ready=7))
    assert sum(count.calls.values()) == 1
    assert sum(count.sent.values()) <= 200


# Ends.


def _close(phases):
    """Returns this rank's error when each rank ends the phase that it is told to."""
    post = RankRequest(phase=phases[dist.get_rank()], is_done=True)
    try:
        posts = OrderNegotiation(None, MAX_WANTS).exchange(post)
    except DesyncError as error:
        return str(error)
    assert [one.phase for one in posts] == list(phases)
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
    post = RankRequest(phase=BACKWARD if rank == 1 else FORWARD, is_done=rank != 1)
    posts = OrderNegotiation(None, MAX_WANTS).exchange(post)
    assert [one.is_done for one in posts] == [True, False, True]


@distributed(world_size=4)
def test_a_group_speaks_of_world_ranks():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    meeting = OrderNegotiation(groups[rank % 2], MAX_WANTS)
    assert [post.num_ready for post in meeting.exchange(RankRequest(phase=FORWARD, num_ready=rank))] == [
        rank % 2,
        rank % 2 + 2,
    ]
    with pytest.raises(DesyncError, match=rf"^ranks \[{rank % 2 + 2}\] have finished a backward"):
        meeting.exchange(RankRequest(phase=BACKWARD if rank >= 2 else FORWARD, is_done=True))
