"""Where parameters, buckets and shards lie: every element has one range, one bucket and one owner."""

from __future__ import annotations

import math
import random

import pytest
import torch

from booster.plugins.low_level_zero.flat_params import FlatLayout


def random_shapes(generator):
    shapes = []
    for _ in range(generator.randrange(1, 12)):
        shapes.append(tuple(generator.choice([1, 2, 3, 7, 16, 65]) for _ in range(generator.randrange(0, 4))))
    return shapes


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
def test_every_element_has_one_owner(seed, num_shards):
    generator = random.Random(seed)
    shapes = random_shapes(generator)
    layout = FlatLayout(shapes, num_shards, generator.choice([1, 100, 1000, 10**6]))
    owner = torch.full((layout.numel,), -1)
    for rank in range(num_shards):
        for owned in layout.owned_ranges(rank):
            assert bool((owner[owned.in_buffer] == -1).all())
            owner[owned.in_buffer] = rank
            param_range, bucket = layout.param_ranges[owned.param], layout.buckets[owned.bucket]
            assert (
                owned.in_buffer.start
                == param_range.start + owned.span[0]
                == bucket.shard_range(rank).start + owned.range_in_shard.start
            )
            assert (
                owned.in_buffer.stop
                == param_range.start + owned.span[1]
                == bucket.shard_range(rank).start + owned.range_in_shard.stop
            )
            assert 0 <= owned.range_in_shard.start < owned.range_in_shard.stop <= bucket.shard_numel
    end = 0
    for shape, param_range in zip(shapes, layout.param_ranges, strict=True):
        assert param_range.start == math.ceil(end / 8) * 8
        assert param_range.stop == param_range.start + math.prod(shape)
        assert bool((owner[param_range.start : param_range.stop] >= 0).all())
        owner[param_range.start : param_range.stop] = -1
        end = param_range.stop
    assert bool((owner == -1).all())


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_padding_is_what_belongs_to_no_parameter(seed, num_shards):
    generator = random.Random(seed)
    layout = FlatLayout(random_shapes(generator), num_shards, generator.choice([1, 100, 1000]))
    is_padding = torch.ones(layout.numel, dtype=torch.bool)
    for param_range in layout.param_ranges:
        is_padding[param_range.start : param_range.stop] = False
    found = torch.zeros(layout.numel, dtype=torch.bool)
    for bucket in layout.buckets:
        for padding in layout.padding_in(bucket):
            found[bucket.start : bucket.stop][padding] = True
    assert torch.equal(found, is_padding)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_buckets_tile_the_buffer_in_equal_aligned_parts(seed, num_shards):
    generator = random.Random(1000 + seed)
    limit = generator.choice([1, 256, 1024])
    layout = FlatLayout(random_shapes(generator), num_shards, limit)
    stops = [0, *(bucket.stop for bucket in layout.buckets)]
    assert [bucket.start for bucket in layout.buckets] == stops[:-1]
    assert stops[-1] == layout.numel == layout.shard_numel * num_shards
    for bucket in layout.buckets:
        assert 0 < bucket.numel <= max(limit, 32 * num_shards)
        assert bucket.numel == bucket.shard_numel * num_shards
        for rank in range(num_shards):
            assert bucket.shard_range(rank).start % 32 == 0
    # The shards of a rank follow each other in its shard.
    ends = [0, *(bucket.offset_in_shard + bucket.shard_numel for bucket in layout.buckets)]
    assert [bucket.offset_in_shard for bucket in layout.buckets] == ends[:-1]


def test_padding_is_at_the_end_and_small():
    layout = FlatLayout([(1000, 999)], num_shards=4, max_bucket_numel=51_200)
    assert layout.numel - 999_000 < 4 * 32
    assert len(layout.buckets) == 20
    sizes = {bucket.numel for bucket in layout.buckets}
    assert max(sizes) - min(sizes) <= 4 * 32


def test_parameters_without_elements_lie_in_no_bucket():
    layout = FlatLayout([(0, 5), (3,), (0,)], num_shards=2, max_bucket_numel=10)
    assert layout.params_in(layout.buckets[0]) == [1]
    assert FlatLayout([(0,)], num_shards=2, max_bucket_numel=10).buckets == []
