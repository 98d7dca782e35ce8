"""Buffers of gathered weights: one that somebody still looks at is never handed out, however the look was taken."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.dlpack import to_dlpack

from booster.plugins.sharding import buffer_pool
from booster.plugins.sharding.buffer_pool import BufferPool

NUM_BYTES = 4096


@pytest.fixture
def pool():
    return BufferPool(torch.device("cpu"))


def address(buffer):
    return buffer.memory.data_ptr()


def weights_in(buffer):
    return buffer.view(NUM_BYTES // 4, torch.float32)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, weight):
        ctx.save_for_backward(weight)
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


def saved_by_an_operator(flat):
    """As a linear layer does: the gradient of its input is computed from the weights."""
    weight = nn.Parameter(torch.empty(32, 32))
    weight.data = flat.view(32, 32)
    output = nn.functional.linear(torch.ones(2, 32, requires_grad=True), weight)
    weight.data = torch.empty(())
    return output


# Ways in which a user or autograd can go on looking at weights.
LOOKS = {
    "view": lambda flat: flat[3:7],
    "view in a shape": lambda flat: flat.view(32, 32).t(),
    "empty view": lambda flat: flat[:0],
    "detached": lambda flat: flat.view(32, 32).detach(),
    "other format": lambda flat: flat.view(torch.int16),
    "parameter": nn.Parameter,
    "data of a parameter": lambda flat: nn.Parameter(flat).data,
    "numpy": lambda flat: flat.numpy(),
    "numpy view": lambda flat: flat.numpy()[5:],
    "memoryview": lambda flat: memoryview(flat.numpy()),
    "storage": lambda flat: flat.untyped_storage(),
    "typed view of the storage": lambda flat: torch.empty(0).set_(flat.untyped_storage()),
    "dlpack": to_dlpack,
    "saved by an operator": saved_by_an_operator,
    "saved by a function": lambda flat: Keeps.apply(torch.ones(2, requires_grad=True), flat),
    "in a closure": lambda flat: lambda: flat.sum(),
    "in a list": lambda flat: [{"weight": flat[:2]}],
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_buffer_is_not_handed_out_while_somebody_looks_at_it(pool, kind):
    buffer = pool.acquire(NUM_BYTES)
    home = address(buffer)
    look = LOOKS[kind](weights_in(buffer))
    assert buffer.num_views > 0
    pool.release(buffer)
    for _ in range(3):
        other = pool.acquire(NUM_BYTES)
        assert address(other) != home
        pool.release(other)
    assert pool.bytes_in_use == NUM_BYTES  # that one alone: it is held, though it was not taken
    del look
    assert buffer.num_views == 0
    assert pool.bytes_in_use == 0
    both = [pool.acquire(NUM_BYTES), pool.acquire(NUM_BYTES)]
    assert home in [address(one) for one in both]


def test_what_is_looked_at_does_not_change(pool):
    buffer = pool.acquire(NUM_BYTES)
    look = weights_in(buffer).fill_(1.5)
    pool.release(buffer)
    for value in range(5):
        other = pool.acquire(NUM_BYTES)
        weights_in(other).fill_(value)
        pool.release(other)
    assert torch.equal(look, torch.full_like(look, 1.5))


def test_the_last_look_counts(pool):
    buffer = pool.acquire(NUM_BYTES)
    flat = weights_in(buffer)
    looks = [flat, flat[1:], flat.view(32, 32), flat.detach()]
    del flat
    assert buffer.num_views == 4
    pool.release(buffer)
    for left in (3, 2, 1):
        looks.pop()
        assert buffer.num_views == left
        assert pool.bytes_in_use == NUM_BYTES
    looks.clear()
    assert pool.bytes_in_use == 0
    assert pool.acquire(NUM_BYTES) is buffer


def test_memory_is_used_again(pool):
    homes = set()
    for _ in range(10):
        buffer = pool.acquire(NUM_BYTES)
        homes.add(address(buffer))
        pool.release(buffer)
    assert len(homes) == 1
    assert pool.bytes_held == NUM_BYTES


def test_the_smallest_that_fits_is_taken(pool):
    taken = [pool.acquire(size) for size in (300, 100, 200)]
    for buffer in taken:
        pool.release(buffer)
    assert pool.bytes_held == 600
    assert pool.acquire(150) is taken[2]
    assert pool.acquire(150) is taken[0]
    assert pool.acquire(100) is taken[1]
    assert pool.bytes_in_use == pool.bytes_held == 600


def test_buffers_that_are_too_small_are_freed_for_a_larger_one(pool):
    pool.release(pool.acquire(100))
    pool.acquire(1000)
    assert pool.bytes_held == 1000


def test_a_buffer_shows_its_elements_in_any_format(pool):
    buffer = pool.acquire(64)
    buffer.view(16, torch.float32).copy_(torch.arange(16.0))
    assert torch.equal(buffer.view(4, torch.float32), torch.arange(4.0))
    assert buffer.view(16, torch.bfloat16).dtype is torch.bfloat16
    assert buffer.view(0, torch.float64).numel() == 0
    assert buffer.num_bytes == 64


def test_a_chunk_without_elements_takes_no_memory(pool):
    buffer = pool.acquire(0)
    assert buffer.view(0, torch.float32).shape == (0,)
    pool.release(buffer)
    assert pool.bytes_held == 0


def test_trim_frees_what_is_unused_and_nothing_else(pool):
    free, looked_at, taken = (pool.acquire(NUM_BYTES) for _ in range(3))
    look = weights_in(looked_at)
    pool.release(free)
    pool.release(looked_at)
    assert (pool.bytes_in_use, pool.bytes_held) == (2 * NUM_BYTES, 3 * NUM_BYTES)
    pool.trim()
    assert (pool.bytes_in_use, pool.bytes_held) == (2 * NUM_BYTES, 2 * NUM_BYTES)
    del look
    pool.trim()
    assert pool.bytes_held == NUM_BYTES
    pool.release(taken)
    pool.trim()
    assert (pool.bytes_in_use, pool.bytes_held) == (0, 0)


@pytest.mark.parametrize("seed", range(100))
def test_random_use(seed):
    """What is taken or looked at never overlaps with anything else, and is counted to the byte."""
    generator, pool = random.Random(seed), BufferPool(torch.device("cpu"))
    taken, looks = [], []  # (buffer, size) and (buffer, view, its number)
    for step in range(80):
        action = generator.choice(["take", "take", "look", "give back", "give back", "close", "trim"])
        if action == "take":
            size = generator.choice([0, 8, 64, 512, 4096])
            taken.append(pool.acquire(size))
            assert taken[-1].num_bytes >= size
        elif action == "look" and taken:
            buffer = generator.choice(taken)
            number = next((n for b, _, n in looks if b is buffer), step % 251)
            looks.append((buffer, buffer.memory.view(torch.uint8)[:].fill_(number), number))
        elif action == "give back" and taken:
            pool.release(taken.pop(generator.randrange(len(taken))))
        elif action == "close" and looks:
            looks.pop(generator.randrange(len(looks)))
        elif action == "trim":
            pool.trim()
        used = {id(buffer): buffer.num_bytes for buffer in taken + [buffer for buffer, *_ in looks]}
        assert pool.bytes_in_use == sum(used.values())
        assert pool.bytes_held >= pool.bytes_in_use
        assert len({id(buffer) for buffer in taken}) == len(taken)
        assert all(bool((view == number).all()) for _, view, number in looks)
    looks.clear()
    for buffer in taken:
        pool.release(buffer)
    pool.trim()
    assert pool.bytes_held == 0


# A torch that doesn't tell how often memory is referred to.


@pytest.fixture
def blind_pool(monkeypatch):
    monkeypatch.setattr(buffer_pool, "_use_count", None)
    return BufferPool(torch.device("cpu"))


@pytest.mark.parametrize("kind", LOOKS)
def test_who_cannot_count_uses_no_buffer_twice(blind_pool, kind):
    homes, looks = set(), []
    for _ in range(5):
        buffer = blind_pool.acquire(NUM_BYTES)
        assert address(buffer) not in homes
        homes.add(address(buffer))
        looks.append(LOOKS[kind](weights_in(buffer)))
        blind_pool.release(buffer)
    assert len(homes) == 5
    assert blind_pool.bytes_in_use == blind_pool.bytes_held == 0


def test_who_cannot_count_still_knows_what_is_taken(blind_pool):
    buffer = blind_pool.acquire(NUM_BYTES)
    assert blind_pool.bytes_in_use == blind_pool.bytes_held == NUM_BYTES
    look = weights_in(buffer).fill_(3.0)
    blind_pool.release(buffer)
    assert torch.equal(look, torch.full_like(look, 3.0))
    blind_pool.trim()
    assert blind_pool.bytes_held == 0


def test_this_torch_can_count():
    """Else nothing above has tested the way that training takes."""
    assert buffer_pool._use_count is not None
