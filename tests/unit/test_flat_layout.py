"""Where parameters, buckets and shards lie: every element has one place, one bucket and one owner."""

from __future__ import annotations

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
        for part in layout.parts(rank):
            assert bool((owner[part.in_buffer] == -1).all())
            owner[part.in_buffer] = rank
            place, bucket = layout.places[part.place], layout.buckets[part.bucket]
            assert part.in_buffer.start == place.start + part.span[0] == bucket.piece(rank).start + part.in_piece.start
            assert part.in_buffer.stop == place.start + part.span[1] == bucket.piece(rank).start + part.in_piece.stop
            assert 0 <= part.in_piece.start < part.in_piece.stop <= bucket.piece_numel
    used = sum(torch.Size(shape).numel() for shape in shapes)
    assert bool((owner[:used] >= 0).all())
    assert bool((owner[used:] == -1).all())
    assert layout.places[-1].stop == used


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_buckets_tile_the_buffer_in_equal_aligned_pieces(seed, num_shards):
    generator = random.Random(1000 + seed)
    limit = generator.choice([1, 256, 1024])
    layout = FlatLayout(random_shapes(generator), num_shards, limit)
    stops = [0, *(bucket.stop for bucket in layout.buckets)]
    assert [bucket.start for bucket in layout.buckets] == stops[:-1]
    assert stops[-1] == layout.numel == layout.shard_numel * num_shards
    for bucket in layout.buckets:
        assert 0 < bucket.numel <= max(limit, 32 * num_shards)
        assert bucket.numel == bucket.piece_numel * num_shards
        for rank in range(num_shards):
            assert bucket.piece(rank).start % 32 == 0
    # The pieces of a rank follow each other in its shard.
    ends = [0, *(bucket.shard_start + bucket.piece_numel for bucket in layout.buckets)]
    assert [bucket.shard_start for bucket in layout.buckets] == ends[:-1]


def test_padding_is_at_the_end_and_small():
    layout = FlatLayout([(1000, 999)], num_shards=4, max_bucket_numel=51_200)
    assert layout.numel - 999_000 < 4 * 32
    assert len(layout.buckets) == 20
    sizes = {bucket.numel for bucket in layout.buckets}
    assert max(sizes) - min(sizes) <= 4 * 32


def test_parameters_without_elements_have_no_place_in_a_bucket():
    layout = FlatLayout([(0, 5), (3,), (0,)], num_shards=2, max_bucket_numel=10)
    assert layout.places_in(layout.buckets[0]) == [1]
    assert FlatLayout([(0,)], num_shards=2, max_bucket_numel=10).buckets == []
