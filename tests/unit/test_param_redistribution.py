"""How rows are divided over ranks and parameters over owners: pure functions, and a world of one rank."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from booster.plugins.torch_fsdp.param_redistribution import ParamRedistribution, RowSharded, assign_owners, row_range

SHAPES = [(), (1,), (5,), (7, 3), (2, 3, 4), (0, 3), (8, 0), (64, 2)]


def members_of(sizes, dtype=torch.float32):
    return [RowSharded(name=f"p{index}", shape=(size,), dtype=dtype) for index, size in enumerate(sizes)]


def loads(members, owners, num_ranks):
    totals = [0] * num_ranks
    for member, owner in zip(members, owners, strict=True):
        totals[owner] += member.numel * member.dtype.itemsize
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
    assert assign_owners(members_of([10, 30, 20, 30, 10]), 2) == [1, 0, 0, 1, 1]
    assert assign_owners(members_of([5, 5, 5, 5]), 3) == [0, 1, 2, 0]
    assert assign_owners(members_of([5]), 4) == [0]
    assert assign_owners([], 2) == []


def test_bytes_count_and_not_elements():
    members = [
        RowSharded(name="half", shape=(3, 2), dtype=torch.bfloat16),
        RowSharded(name="double", shape=(2, 2), dtype=torch.float64),
        RowSharded(name="single", shape=(5,), dtype=torch.float32),
    ]
    assert assign_owners(members, 2) == [1, 0, 1]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_no_rank_has_much_more_than_its_share(num_ranks):
    draw = random.Random(num_ranks)
    for _ in range(20):
        members = members_of([draw.randrange(1, 1000) for _ in range(draw.randrange(1, 60))])
        totals = loads(members, assign_owners(members, num_ranks), num_ranks)
        largest = max(member.numel * 4 for member in members)
        least_possible = max(largest, sum(totals) / num_ranks)
        assert max(totals) <= least_possible + largest
        assert max(totals) - min(totals) <= largest


def test_one_rank_has_everything_already():
    whole = torch.randn(7, 3)
    exchange = ParamRedistribution(
        [RowSharded(name="w", shape=(7, 3), dtype=torch.float32)], [0], None, torch.device("cpu")
    )
    shard = whole.reshape(-1).clone()
    wholes = exchange.to_owners({0: shard})
    assert list(wholes) == [0]
    assert torch.equal(wholes[0], whole)
    wholes[0].mul_(2)
    assert torch.equal(shard, whole.reshape(-1))  # in new memory
    exchange.from_owners(wholes, {0: shard})
    assert torch.equal(shard, 2 * whole.reshape(-1))


def test_mistakes_are_seen_before_anything_is_sent():
    member = RowSharded(name="w", shape=(4, 2), dtype=torch.float32)
    exchange = ParamRedistribution([member], [0], None, torch.device("cpu"))
    for shards in ({}, {0: torch.empty(7)}, {0: torch.empty(8, dtype=torch.float64)}, {0: torch.empty(16)[::2]}):
        with pytest.raises(AssertionError, match=r"not 8 contiguous torch\.float32"):
            exchange.to_owners(shards)
    for wholes in ({}, {0: torch.empty(2, 4)}, {0: torch.empty(4, 2, dtype=torch.float16)}):
        with pytest.raises(AssertionError, match="rank 0 owns"):
            exchange.from_owners(wholes, {0: torch.empty(8)})
    with pytest.raises(AssertionError, match=r"invalid owners \(.*\) of 1 members on 1 ranks"):
        ParamRedistribution([member], [1], None, torch.device("cpu"))
    with pytest.raises(AssertionError, match="invalid owners"):
        ParamRedistribution([member], [], None, torch.device("cpu"))
