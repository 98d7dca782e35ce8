"""The blocks of a grid: together they are the whole tensor, each in one place."""

from __future__ import annotations

import itertools

import pytest
import torch

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel_nd import LINEAR_3D_ACTIVATIONS, SUMMA_ACTIVATIONS, BlockLayout

SUMMA = {"depth": 2, "row": 2, "column": 2}
CUBE = {"output": 2, "input": 2, "weight": 2}


def all_places(sizes):
    for places in itertools.product(*(range(size) for size in sizes.values())):
        yield dict(zip(sizes, places, strict=True))


@pytest.mark.parametrize(("layout", "sizes"), [(SUMMA_ACTIVATIONS, SUMMA), (LINEAR_3D_ACTIVATIONS, CUBE)])
def test_the_blocks_of_activations_are_the_whole(layout, sizes):
    whole = torch.arange(16 * 6).view(16, 6)
    blocks = [layout.block(whole, sizes, places) for places in all_places(sizes)]
    assert all(block.shape == (4, 3) and block.is_contiguous() for block in blocks)
    assert sorted(torch.cat([block.flatten() for block in blocks]).tolist()) == list(range(16 * 6))


def test_the_outermost_axis_counts_the_most():
    rows = torch.arange(8)
    layout = BlockLayout((("weight", "input"),))
    starts = {
        (places["weight"], places["input"]): int(layout.block(rows, CUBE, places)[0]) for places in all_places(CUBE)
    }
    assert starts == {(0, 0): 0, (0, 1): 2, (1, 0): 4, (1, 1): 6}


def test_axes_that_cut_nothing_hold_copies():
    whole = torch.arange(4)
    blocks = {tuple(BlockLayout((("column",),)).block(whole, SUMMA, places).tolist()) for places in all_places(SUMMA)}
    assert blocks == {(0, 1), (2, 3)}


def test_a_block_is_a_copy():
    whole = torch.zeros(4, 4)
    BlockLayout((("row",), ("column",))).block(whole, SUMMA, {"depth": 0, "row": 0, "column": 0}).fill_(1)
    assert not whole.any()


@pytest.mark.parametrize(("size", "advice"), [(6, "4 or 8"), (3, "4"), (0, "4"), (9, "8 or 12")])
def test_what_cannot_be_divided_names_the_next_sizes(size, advice):
    with pytest.raises(
        ConfigError, match=rf"0 of the batch is {size}, which is not divisible by 4 ranks: use {advice}$"
    ):
        SUMMA_ACTIVATIONS.block(torch.zeros(size, 2), SUMMA, {"depth": 0, "row": 0, "column": 0}, "the batch")
