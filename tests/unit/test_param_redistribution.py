"""How rows are divided over ranks and parameters over owners: pure functions, and a world of one rank."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from booster.core.param_redistribution import assign_owners
from booster.plugins.torch_fsdp.shard_update import RowRedistribution, row_range

SHAPES = [(), (1,), (5,), (7, 3), (2, 3, 4), (0, 3), (8, 0), (64, 2)]


def loads(sizes, owners, num_ranks):
    totals = [0] * num_ranks
    for size, owner in zip(sizes, owners, strict=True):
        totals[owner] += size
    return totals


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 512])
def test_spans_are_those_of_equal_chunks_of_rows(shape, num_ranks):
    whole = torch.arange(math.prod(shape)).view(shape)
    chunks = list(torch.chunk(whole, num_ranks)) if shape else [whole]
    chunks += [whole.reshape(-1)[:0]] * (num_ranks - len(chunks))
    for rank, chunk in enumerate(chunks):
        start, stop = row_range(shape, rank, num_ranks)
        assert torch.equal(whole.reshape(-1)[start:stop], chunk.reshape(-1))
    ends = [row_range(shape, rank, num_ranks) for rank in range(num_ranks)]
    assert ends[0][0] == 0
    assert ends[-1][1] == whole.numel()
    assert all(first[1] == second[0] for first, second in itertools.pairwise(ends))


def test_the_largest_go_first_to_the_rank_with_the_fewest_bytes():
    assert assign_owners([10, 30, 20, 30, 10], 2) == [1, 0, 0, 1, 1]
    assert assign_owners([5, 5, 5, 5], 3) == [0, 1, 2, 0]
    assert assign_owners([5], 4) == [0]
    assert assign_owners([], 2) == []


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_no_rank_has_much_more_than_its_share(num_ranks):
    draw = random.Random(num_ranks)
    for _ in range(20):
        sizes = [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 60))]
        totals = loads(sizes, assign_owners(sizes, num_ranks), num_ranks)
        largest = max(sizes)
        least_possible = max(largest, sum(totals) / num_ranks)
        assert max(totals) <= least_possible + largest
        assert max(totals) - min(totals) <= largest


def test_one_rank_has_everything_already():
    whole = torch.randn(7, 3)
    exchange = RowRedistribution([(7, 3)], [0], None)
    shard = whole.reshape(-1).clone()
    wholes = exchange.to_owners({0: shard})
    assert list(wholes) == [0]
    assert torch.equal(wholes[0], whole)
    wholes[0].mul_(2)
    assert torch.equal(shard, whole.reshape(-1))  # in new memory
    exchange.from_owners(wholes, {0: shard})
    assert torch.equal(shard, 2 * whole.reshape(-1))
