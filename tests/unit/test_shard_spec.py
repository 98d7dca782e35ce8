"""Layouts of cut parameters: every element of the logical tensor is held, once where it counts, whatever is sharded."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from booster.errors import ConfigError
from booster.interface import ShardRegion, ShardSpec, set_shard_spec, shard_spec_of
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import (
    Block,
    local_sizes,
    sharded_spec,
    units_of_rank,
    vocabulary_spec,
)


def query_key_value(num_heads: int, num_groups: int, head_size: int) -> list[Block]:
    kv = Block(num_units=num_groups, unit_size=head_size, num_query_units=num_heads, num_groups=num_groups)
    return [Block(num_units=num_heads, unit_size=head_size, num_groups=num_groups), kv, kv]


CASES = {
    "rows": lambda ranks, rank: sharded_spec((7, 3), 0, [Block(num_units=7)], ranks, rank),
    "columns": lambda ranks, rank: sharded_spec((3, 7), 1, [Block(num_units=7)], ranks, rank),
    "middle": lambda ranks, rank: (
        sharded_spec((2, 6, 3), -2, [Block(num_units=3)] * 2, ranks, rank)
        if ranks < 4
        else sharded_spec((2, 8, 3), 1, [Block(num_units=4)] * 2, ranks, rank)
    ),
    "heads": lambda ranks, rank: sharded_spec((24, 5), 0, query_key_value(4, 4, 2), ranks, rank),
    "two groups": lambda ranks, rank: (
        sharded_spec((8 * 2 + 8, 5), 0, query_key_value(8, 2, 2), ranks, rank)
        if ranks != 3
        else sharded_spec((6 * 2 + 8, 5), 0, query_key_value(6, 2, 2), ranks, rank)
    ),
    "one group, by columns": lambda ranks, rank: sharded_spec((5, 12), 1, query_key_value(4, 1, 2), ranks, rank),
    "vocabulary": lambda ranks, rank: vocabulary_spec((13, 3), 8, ranks, rank),
    "vocabulary of few": lambda ranks, rank: vocabulary_spec((3,), 8, ranks, rank),
    "whole": lambda ranks, rank: ShardSpec.unsharded((5, 2), is_primary=rank == 0),
    "scalar": lambda ranks, rank: ShardSpec.unsharded((), is_primary=rank == 0),
}


@pytest.fixture(params=list(itertools.product(CASES, [1, 2, 3, 4])), ids=lambda one: f"{one[0]} over {one[1]}")
def layouts(request):
    name, ranks = request.param
    return [CASES[name](ranks, rank) for rank in range(ranks)]


def logical_tensor(layout):
    return torch.arange(1, 1 + int(torch.tensor(layout.logical_shape).prod())).view(layout.logical_shape).float()


def test_slices_are_all_elements_once_and_alike(layouts):
    whole = logical_tensor(layouts[0])
    count = torch.zeros_like(whole)
    for layout in layouts:
        local = layout.shard(whole)
        assert tuple(local.shape) == layout.local_shape
        for part in layout.slices("w", local):
            index = tuple(slice(start, start + length) for start, length in part.box)
            assert part.global_shape == layout.logical_shape
            assert torch.equal(whole[index].reshape(-1)[slice(*part.span)], part.tensor.reshape(-1))
            count[index] += part.primary
    assert torch.equal(count, torch.ones_like(count))


@pytest.mark.parametrize("num_shards", [2, 3, 5])
def test_stretches_are_the_same_elements(layouts, num_shards):
    whole = logical_tensor(layouts[0])
    count = torch.zeros_like(whole)
    total = 0.0
    for layout in layouts:
        flat = layout.shard(whole).view(-1)
        cuts = [flat.numel() * index // num_shards for index in range(num_shards + 1)]
        for span in itertools.pairwise(cuts):
            stretch = flat[slice(*span)].clone()
            positions = layout.positions(span)
            assert torch.equal(torch.where(positions >= 0, whole.view(-1)[positions], 0.0), stretch)
            total += sum(float(view.sum()) for view in layout.owned(stretch, span))
            for part in layout.slices("w", stretch, span=span):
                index = tuple(slice(start, start + length) for start, length in part.box)
                assert torch.equal(whole[index].reshape(-1)[slice(*part.span)], part.tensor.reshape(-1))
                assert part.tensor.numel() == 0 or part.tensor.data_ptr() >= stretch.data_ptr()
                if len(part.tensor.shape) == whole.dim() and part.span == (0, part.tensor.numel()):
                    count[index] += part.primary
                else:
                    count.view(-1)[slice(*part.span)] += part.primary
    assert torch.equal(count, torch.ones_like(count))
    assert total == float(whole.sum())


def test_slices_are_memory_of_the_tensor(layouts):
    whole = logical_tensor(layouts[0])
    for layout in layouts:
        local = torch.zeros(layout.local_shape)
        for part in layout.slices("w", local):
            index = tuple(slice(start, start + length) for start, length in part.box)
            part.tensor.copy_(whole[index].view(part.tensor.shape))
        assert torch.equal(local, layout.shard(whole))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_one_stretch_has_the_first_element(layouts, num_shards):
    holders = 0
    for layout in layouts:
        size = max(1, int(torch.tensor(layout.local_shape).prod()))
        cuts = [size * index // num_shards for index in range(num_shards + 1)]
        holders += sum(layout.holds_first(span) for span in itertools.pairwise(cuts))
    assert holders == 1


def test_empty_tensors_have_one_first_holder():
    layouts = [ShardSpec.unsharded((0, 3), is_primary=rank == 0) for rank in range(2)]
    assert [layout.holds_first() for layout in layouts] == [True, False]
    assert [len(layout.slices("w", torch.zeros(0, 3))) for layout in layouts] == [1, 1]


def test_padding_is_zero_and_in_no_slice():
    layout = vocabulary_spec((13, 3), 8, 2, 1)
    assert layout.local_shape == (8, 3)
    assert layout.has_padding
    assert torch.equal(layout.shard(torch.ones(13, 3))[5:], torch.zeros(3, 3))
    assert [part.box for part in layout.slices("w", torch.zeros(8, 3))] == [((8, 5), (0, 3))]


def test_layouts_are_attached_to_parameters():
    parameter = nn.Parameter(torch.zeros(4, 2))
    assert shard_spec_of(parameter) == ShardSpec.unsharded((4, 2))
    layout = ShardSpec(
        logical_shape=(8, 2),
        local_shape=(4, 2),
        regions=(ShardRegion(local=((0, 4), (0, 2)), logical=((4, 4), (0, 2))),),
    )
    set_shard_spec(parameter, layout)
    assert shard_spec_of(parameter) is layout
    assert not layout.is_unsharded
    with pytest.raises(ValueError, match="does not match"):
        set_shard_spec(nn.Parameter(torch.zeros(3)), layout)


def test_key_value_heads_go_with_their_query_heads():
    query, key, _ = query_key_value(8, 2, 4)
    assert [units_of_rank(query, 4, rank).start for rank in range(4)] == [0, 2, 4, 6]
    held = [units_of_rank(key, 4, rank) for rank in range(4)]
    assert [(one.start, one.stop, one.num_non_primary) for one in held] == [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)]
    assert local_sizes([query, key, key], 4) == [16] * 4
    assert local_sizes([Block(num_units=7, unit_size=2)], 3) == [6, 4, 4]


@pytest.mark.parametrize(
    ("blocks", "ranks", "told"),
    [
        (query_key_value(4, 4, 2), 5, "some ranks would have none"),
        (query_key_value(8, 2, 2), 3, "unevenly"),
    ],
)
def test_what_can_not_be_divided_is_refused(blocks, ranks, told):
    with pytest.raises(ConfigError, match=told):
        [units_of_rank(block, ranks, rank) for rank, block in itertools.product(range(ranks), blocks)]


def test_blocks_have_to_add_up():
    with pytest.raises(ConfigError, match="do not add up"):
        sharded_spec((7, 3), 0, [Block(num_units=6)], 2, 0)
