"""Small collectives as messages: what each rank sends to whom, among few ranks and many."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from queue import Queue
from unittest import mock

import pytest
import torch
from harness import run_ranks

from booster.comm import all_gather_equal, all_reduce_numbers, broadcast, use_shared_memory
from booster.comm.collectives import p2p_all_gather, p2p_all_reduce, p2p_broadcast

SIZES = [2, 3, 8, 9, 13, 16, 17, 64]


class _Messages:
    """Messages between threads that stand for ranks."""

    def __init__(self, size):
        self.size, self.group = size, None
        self.rank = threading.local()
        self._queues = defaultdict(Queue)
        self.sent, self.rounds = Counter(), Counter()

    def small_tag(self, nbytes):
        return nbytes

    def send_to(self, tensor, receiver, tag):
        assert tensor.is_contiguous()
        self.sent[self.rank.value] += 1
        self._queues[self.rank.value, receiver, tag].put(tensor.clone())
        return lambda: None

    def receive_from(self, tensor, sender, tag):
        rank = self.rank.value
        return lambda: tensor.copy_(self._queues[sender, rank, tag].get(timeout=30))

    def wait(self, work):
        work()

    def run(self, call):
        """Returns what a call gives on each rank."""
        found = {}

        def run(rank):
            self.rank.value = rank
            found[rank] = call(rank)

        patches = (
            mock.patch("torch.distributed.get_world_size", return_value=self.size),
            mock.patch("torch.distributed.get_rank", side_effect=lambda group: self.rank.value),
        )
        with patches[0], patches[1]:
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=60)
        assert len(found) == self.size
        return [found[rank] for rank in range(self.size)]


def _values(rank, numel=3):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(size):
    messages = _Messages(size)

    def gather(rank):
        joined = torch.full((size * 3,), math.nan)
        p2p_all_gather(messages, joined, _values(rank))
        return joined

    expected = torch.cat([_values(rank) for rank in range(size)])
    for joined in messages.run(gather):
        assert torch.equal(joined, expected)
    most = size - 1 if size <= 8 else math.ceil(math.log2(size))
    assert set(messages.sent.values()) == {most}


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_has_equal_bits_whatever_the_messages(size):
    messages = _Messages(size)

    def reduce(rank):
        total = _values(rank)
        p2p_all_reduce(messages, total, "sum")
        return total

    expected = _values(0)
    for rank in range(1, size):
        expected = expected + _values(rank)
    for total in messages.run(reduce):
        assert torch.equal(total, expected)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast(size):
    for source in {0, 1, size // 2, size - 1}:
        messages = _Messages(size)

        def send(rank, messages=messages, source=source):
            buffer = _values(rank)
            p2p_broadcast(messages, buffer, source)
            return buffer

        for buffer in messages.run(send):
            assert torch.equal(buffer, _values(source))
        assert sum(messages.sent.values()) == size - 1
        assert max(messages.sent.values()) == (size - 1 if size <= 8 else math.ceil(math.log2(size)))


def _communicate(size):
    use_shared_memory(False)
    rank = torch.distributed.get_rank()
    assert all_reduce_numbers([float(rank), 1.0]) == [size * (size - 1) / 2, size]
    assert all_gather_equal(torch.tensor([rank])).tolist() == list(range(size))
    buffer = torch.full((5,), float(rank))
    broadcast([buffer], source=size - 2)
    assert buffer.tolist() == [size - 2] * 5


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 12])
def test_more_ranks_than_send_to_each_other_at_once(size):
    run_ranks(_communicate, size, size)
