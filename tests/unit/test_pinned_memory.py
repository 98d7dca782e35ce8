"""Pinned memory in slabs: powers of two of bounded size, of which blocks never share a byte."""

from __future__ import annotations

import random

import pytest
import torch

from booster.plugins.sharding import pinned_memory
from booster.plugins.sharding.pinned_memory import PinnedMemory

MAX = 2**20


@pytest.fixture
def slabs(monkeypatch):
    """The sizes of the slabs, in memory that is not pinned."""
    empty, sizes = torch.empty, []

    def record(num_bytes, *, pin_memory, **settings):
        assert pin_memory
        sizes.append(num_bytes)
        return empty(num_bytes, **settings)

    monkeypatch.setattr(torch, "empty", record)
    monkeypatch.setattr(pinned_memory, "MAX_SLAB_BYTES", MAX)
    return sizes


def test_slabs_are_powers_of_two_of_bounded_size(slabs):
    memory = PinnedMemory()
    needed = 0
    for _ in range(100):
        memory.allocate(200_001)
        needed += 200_001
        assert memory.num_bytes == sum(slabs) < max(3 * needed, 1.3 * needed + MAX)
    assert all(size.bit_count() == 1 for size in slabs)
    assert max(slabs) == MAX


def test_a_block_beyond_the_bound_leaves_its_rest_to_others(slabs):
    memory = PinnedMemory()
    memory.allocate(5 * MAX)
    assert slabs == [8 * MAX]
    memory.allocate(3 * MAX)
    assert slabs == [8 * MAX]


@pytest.mark.parametrize("seed", range(3))
def test_blocks_share_no_byte(slabs, seed):
    generator, memory, blocks = random.Random(seed), PinnedMemory(), {}
    for number in range(250):
        if blocks and generator.random() < 0.45:
            blocks.pop(generator.choice(list(blocks))).free()
        else:
            blocks[number] = block = memory.allocate(generator.choice([0, 1, 100, 4096, 5000, 300_000]))
            block.memory.fill_(number)
        for value, block in blocks.items():
            assert block.memory.eq(value).all()
    for block in blocks.values():
        block.free()
    before = memory.num_bytes
    memory.allocate(max(slabs))
    assert memory.num_bytes == before  # what is freed is whole again
