"""Links: tensors arrive in order while both ends go on, and a rank that fails tells its neighbours at once."""

from __future__ import annotations

import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, distributed, run_ranks

from booster.comm import (
    Fault,
    RecvChannel,
    SendChannel,
    TensorMeta,
    abort_groups,
    all_reduce_sum,
    count_communication,
    inject_faults,
    p2p,
    report_failure,
    use_shared_memory,
)
from booster.device import current_device
from booster.errors import ConfigError, RankFailedError

pytestmark = pytest.mark.on_device

AT_ONCE_SECONDS = 15  # on a busy machine; a second otherwise, where nothing but the connection has to be noticed
PATIENT = timedelta(minutes=5)


def spec_of(tensor):
    return TensorMeta(tuple(tensor.shape), tensor.dtype)


def read_number(header):
    """Reads a header that is the number of the message below."""
    return [spec_of(tensor) for tensor in messages()[int(header)]]


def no_header(header):
    raise AssertionError(f"{header!r} came, but all shapes were known")


def _of_every_dtype():
    raw = torch.arange(64, dtype=torch.uint8)
    return [(raw % 2 if dtype == torch.bool else raw).view(dtype) for dtype in p2p._DTYPES]


@functools.cache
def messages():
    """Returns tensors on this rank's device."""
    with current_device():
        return [
            [torch.arange(6.0).view(2, 3)],
            [],
            [
                torch.arange(60.0).view(5, 12).t()[::2],
                torch.tensor(3),
                torch.empty(0, 4),
                torch.ones(1, 2).expand(3, 2),
            ],
            _of_every_dtype(),
            [torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj(), torch.nn.Parameter(torch.ones(2))],
            [torch.full((1000, 100), 5.0)],
        ]


def assert_message(tensors, number):
    assert len(tensors) == len(messages()[number])
    for got, sent in zip(tensors, messages()[number], strict=True):
        assert (got.shape, got.dtype) == (sent.shape, sent.dtype)
        assert got.is_contiguous()
        assert not got.requires_grad
        as_sent = sent.detach().resolve_conj().contiguous()
        assert torch.equal(got.view(-1).view(torch.uint8), as_sent.view(-1).view(torch.uint8))


def known_as(is_known):
    return [lambda one=one: read_number(str(one)) if is_known(one) else None for one in range(len(messages()))]


@distributed(2)
@pytest.mark.parametrize("unknown", [(), (0,), (2, 3), range(6)], ids=str)
@pytest.mark.parametrize("order", [range(6), (5, 0, 3, 1, 4, 2), (2, 1, 0, 5, 4, 3)], ids=str)
@pytest.mark.parametrize("posted", [0, 2, 6])
def test_messages_arrive_in_any_order_of_taking(unknown, order, posted):
    if dist.get_rank() == 0:
        link = SendChannel(1, None)
        for number, tensors in enumerate(messages()):
            link.send(tensors, str(number).encode() if number in unknown else None)
        assert len(link._messages) == len(messages())
        link.wait()
        assert len(link._messages) == 0
        return
    headers = []

    def read(header):
        headers.append(header)
        return read_number(header)

    link = RecvChannel(0, None, read)
    link.expect(known_as(lambda number: number not in unknown))
    link.post_recvs(posted)
    for number in order:
        assert_message(link.recv(number), number)
    assert headers == [str(number).encode() for number in unknown]


@distributed(2)
def test_what_a_header_says_is_known_of_later_messages():
    """As with a cache of shapes: the first message has a header, and what follows is like it."""
    known, headers = [], []

    def read(header):
        headers.append(header)
        known[:] = read_number(header)
        return known

    if dist.get_rank() == 0:
        link = SendChannel(1, None)
        for run in range(2):
            for index in range(3):
                link.send(messages()[2], b"2" if run == index == 0 else None)
            link.wait()
        return
    link = RecvChannel(0, None, read)
    for _ in range(2):
        link.expect([lambda: known or None] * 3)
        for index in (2, 0, 1):
            assert_message(link.recv(index), 2)
        assert headers == [b"2"]


@distributed(3, device="cpu")  # with NCCL, both ends start in one order
def test_both_ways_at_once_around_a_ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [(rank + 1) % size, (rank - 1) % size]
    incoming = {other: RecvChannel(other, None, no_header) for other in others}
    outgoing = {other: SendChannel(other, None) for other in others}
    shapes = [(index * 1000, 3) for index in range(8)]
    for link in incoming.values():
        link.expect([lambda shape=shape: [TensorMeta(shape, torch.float32)] for shape in shapes])
        link.post_recvs(len(shapes))
    for shape in shapes:
        for other, link in outgoing.items():
            link.send([torch.full(shape, float(10 * rank + other))])
    for index, shape in enumerate(shapes):
        for other, link in incoming.items():
            (tensor,) = link.recv(index)
            assert torch.equal(tensor, torch.full(shape, float(10 * other + rank)))
    dist.barrier()
    for link in outgoing.values():
        link.finish(3)  # which were taken
        assert len(link._messages) == len(shapes) - 3
        link.wait()


@distributed(2, device="cpu")
def test_a_sender_does_not_wait_for_messages_with_headers():
    """Else both ranks, who send much before they take anything, would wait for each other."""
    other = 1 - dist.get_rank()
    outgoing = SendChannel(other, None)
    for _ in range(10):
        outgoing.send(messages()[0], b"0")
    assert len(outgoing._messages) == 10
    incoming = RecvChannel(other, None, read_number)
    incoming.expect([lambda: None] * 10)
    for index in range(10):
        assert_message(incoming.recv(index), 0)
    outgoing.wait()


@distributed(2)
def test_messages_are_counted():
    tensor = torch.ones(10, device=current_device())
    with count_communication() as count:
        if dist.get_rank() == 0:
            link = SendChannel(1, None)
            link.send([tensor, torch.empty(0)])
            link.send([tensor], b"abc")
            link.wait()
        else:
            link = RecvChannel(0, None, lambda header: [spec_of(tensor)])
            link.expect([lambda: [spec_of(tensor), spec_of(torch.empty(0))], lambda: None])
            link.recv(1)
            link.recv(0)
    name, number_of_bytes = ("send", count.sent) if dist.get_rank() == 0 else ("receive", count.received)
    assert dict(count.calls) == {name: 3}
    assert number_of_bytes[name] == 40 + 3 + 40


@distributed(2)
def test_mistakes_are_told():
    rank = dist.get_rank()
    for make in (lambda peer: SendChannel(peer, None), lambda peer: RecvChannel(peer, None, no_header)):
        for peer in (rank, 2, -1):
            with pytest.raises(ConfigError, match="cannot have a channel with rank"):
                make(peer)
    if rank == 0:
        link = SendChannel(1, None)
        with pytest.raises(ConfigError, match=r"torch\.sparse_coo.*send a dense one"):
            link.send([torch.ones(2), torch.ones(2).to_sparse()])
        link.send([torch.ones(2)])  # nothing of the message before has been sent
        link.wait()
        return
    link = RecvChannel(0, None, no_header)
    link.expect([lambda: [spec_of(torch.ones(2))]])
    with pytest.raises(AssertionError, match="has taken 0 of 1 earlier ones"):
        link.expect([])
    assert link.recv(0)[0].tolist() == [1.0, 1.0]
    with pytest.raises(AssertionError, match="for the second time"):
        link.recv(0)


def _hit_by_a_fault():
    with inject_faults(Fault.throw(rank=0, at="send", call=2)):
        if dist.get_rank() == 0:
            link = SendChannel(1, None)
            link.send([torch.ones(2)])
            link.send([torch.ones(2)])


def test_faults_hit_links():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_hit_by_a_fault, 2, fresh=True)
    assert failed.value.first.error_type.endswith("InjectedFault")


def _patient_group(ranks=None):
    dist.set_debug_level(dist.DebugLevel.OFF)  # as in a user's run
    return dist.new_group(ranks, timeout=PATIENT)


def _expecting(sender, group, *, is_known=True):
    link = RecvChannel(sender, group, no_header)
    link.expect([lambda: [TensorMeta((100,), torch.float32)] if is_known else None])
    return link


def _error_of(wait):
    """Returns what an error says, and that it came at once."""
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        wait()
    return str(caught.value), time.monotonic() - start


def _fail(text, groups):
    report_failure(text)
    abort_groups(groups)


def _one_hangs_up(way):
    group = _patient_group()
    rank = dist.get_rank()
    others = [other for other in range(dist.get_world_size()) if other != 1]
    all_reduce_sum(torch.ones(1), group)
    if rank == 1:
        for other in others:
            SendChannel(other, group).send([torch.ones(1)])  # no rank receives it, which must not block
        dist.barrier()  # the others are about to wait
        return _fail("ValueError: no such\ntoken", [group])
    links = [RecvChannel(1, group, no_header)] if way == "posted" else []
    for link in links:
        link.expect([lambda: [TensorMeta((1,), torch.float32)], lambda: [TensorMeta((100,), torch.float32)]])
        link.post_recvs(2)
    dist.barrier()
    if way == "posted":
        return _error_of(lambda: links[0].recv(1))
    if way == "send":
        outgoing = SendChannel(1, group)
        outgoing.send([torch.ones(100)])
        return _error_of(outgoing.wait)
    return _error_of(lambda: _expecting(1, group, is_known=way != "header").recv(0))


@pytest.mark.parametrize("way", ["posted", "take", "header", "send"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_hangs_up_fails_those_who_wait_for_it(way, world_size):
    results = run_ranks(_one_hangs_up, world_size, way, fresh=True, device="cpu")
    for rank in set(range(world_size)) - {1}:
        text, seconds = results[rank]
        assert f"rank {rank} could not finish" in text
        assert "rank 1 had failed: ValueError: no such token; rank 1 left the group" in text
        assert seconds < AT_ONCE_SECONDS


def _failure_is_passed_on():
    rank = dist.get_rank()
    pairs = [_patient_group([0, 1]), _patient_group([1, 2])]
    dist.barrier()
    if rank == 2:
        return _fail("the disk is full", pairs)
    if rank == 0:
        return _error_of(lambda: _expecting(1, pairs[0]).recv(0))
    result = _error_of(lambda: _expecting(1, pairs[1]).recv(0))
    abort_groups(pairs)
    return result


def test_the_cause_is_named_behind_the_neighbour_who_passes_it_on():
    results = run_ranks(_failure_is_passed_on, 3, fresh=True, device="cpu")
    for rank, left in ((0, 1), (1, 2)):
        text, seconds = results[rank]
        assert f"rank 2 had failed: the disk is full; rank {left} left the group" in text
        assert seconds < AT_ONCE_SECONDS


def _waits_for_a_collective(is_shared):
    use_shared_memory(is_shared)
    group = _patient_group()
    all_reduce_sum(torch.ones(1), group)
    dist.barrier()
    if dist.get_rank() == 1:
        return _fail("timed out", [group, None])
    return _error_of(lambda: all_reduce_sum(torch.ones(1), group))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_rank_that_hangs_up_fails_collectives(is_shared):
    text, seconds = run_ranks(_waits_for_a_collective, 2, is_shared, fresh=True, device="cpu")[0]
    assert "rank 1 had failed: timed out; rank 1 left the group" in text
    assert seconds < AT_ONCE_SECONDS


def _hangs_up_twice():
    group = _patient_group()
    dist.barrier()
    abort_groups([group, group])
    abort_groups([group])
    dist.barrier()  # other groups live on
    report_failure("one")
    dist.barrier()
    return _error_of(lambda: all_reduce_sum(torch.ones(1), group))[0]


def test_hanging_up_again_does_nothing_and_leaves_other_groups():
    for text in run_ranks(_hangs_up_twice, 2, fresh=True, device="cpu"):
        assert "had failed: one; " in text
        assert "left the group" in text


def test_without_a_world_nothing_is_noted():
    assert not dist.is_initialized()
    report_failure("unread")  # and nothing is raised
    assert not dist.is_initialized()
