"""Boxes and spans as runs of bytes, against going element by element."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from oracles import naive_byte_runs as naive

from booster.checkpoint_io.planning.slices import byte_runs, full_box, run_length, run_start


def all_runs(shape, box, span, itemsize, **more):
    blocks = list(byte_runs(shape, box, span, itemsize, **more))
    rows = [np.stack([block.logical, block.local, block.length], axis=1) for block in blocks]
    return [tuple(row) for row in np.concatenate([np.zeros((0, 3), dtype=np.int64), *rows]).tolist()]


@pytest.mark.parametrize("seed", range(300))
def test_every_byte_is_in_one_run(seed):
    source = random.Random(seed)
    shape, itemsize = naive.random_shape(source), source.choice([1, 2, 4, 8])
    written = np.zeros(math.prod(shape) * itemsize, dtype=np.int64)
    for _, box, span in naive.random_partition(source, shape, source.randint(1, 8)):
        found = all_runs(shape, box, span, itemsize, max_runs=source.choice([1, 3, 65536]))
        assert found == naive.runs(shape, box, span, itemsize), (shape, box, span)
        for logical, _, length in found:
            written[logical : logical + length] += 1
    assert (written == 1).all()


@pytest.mark.parametrize("seed", range(100))
def test_any_slice_of_a_box(seed):
    source = random.Random(seed)
    shape = naive.random_shape(source)
    box = tuple((offset := source.randint(0, size), source.randint(0, size - offset)) for size in shape)
    numel = math.prod(length for _, length in box)
    start = source.randint(0, numel)
    span = (start, source.randint(start, numel))
    assert all_runs(shape, box, span, 4, max_runs=5) == naive.runs(shape, box, span, 4)
    for place, element in enumerate(naive.elements(shape, box, (0, numel)).tolist()):
        assert run_start(shape, box, place) == element


def test_blocks_are_bounded_and_in_slice_order():
    blocks = list(byte_runs((1000, 7), ((0, 1000), (2, 3)), (1, 2998), 2, max_runs=128))
    assert [len(block.logical) for block in blocks] == [128] * 7 + [104]
    local = np.concatenate([block.local for block in blocks])
    length = np.concatenate([block.length for block in blocks])
    assert local[0] == 0
    assert (local[1:] == (local + length)[:-1]).all()
    assert length.sum() == 2997 * 2
    assert all(column.dtype == np.int64 for block in blocks for column in (block.logical, block.local, block.length))


def test_what_is_contiguous_is_one_run():
    assert all_runs((5, 4), full_box((5, 4)), (3, 17), 8) == [(24, 0, 112)]
    assert all_runs((5, 4), ((1, 3), (0, 4)), (0, 12), 1) == [(4, 0, 12)]
    assert all_runs((5, 1, 4), ((1, 3), (0, 1), (0, 4)), (0, 12), 1) == [(4, 0, 12)]
    assert all_runs((), (), (0, 1), 4) == [(0, 0, 4)]


def test_nothing_has_no_runs():
    assert all_runs((0, 4), full_box((0, 4)), (0, 0), 4) == []
    assert all_runs((3, 4), ((0, 3), (1, 2)), (4, 4), 4) == []


def test_offsets_beyond_32_bits():
    shape = (2**20, 2**16)
    assert all_runs(shape, ((2**20 - 1, 1), (1, 2)), (0, 2), 8) == [(((2**20 - 1) * 2**16 + 1) * 8, 0, 16)]


def test_run_length():
    assert run_length((4, 5, 6), ((0, 4), (0, 5), (0, 6))) == 120
    assert run_length((4, 5, 6), ((1, 2), (0, 5), (0, 6))) == 60
    assert run_length((4, 5, 6), ((0, 4), (1, 2), (0, 6))) == 12
    assert run_length((4, 5, 6), ((0, 4), (0, 5), (3, 2))) == 2
    assert run_length((), ()) == 1
