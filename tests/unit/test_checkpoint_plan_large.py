"""Save plans of many ranks and hosts."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from checkpoint_plan_cases import (
    DTYPES,
    PAGE,
    _share,
    check,
    check_hosts,
    flat_spans,
    grid_boxes,
    part,
    plan_of,
    replicas,
)

MATRICES = [("a", (1000, 700)), ("b", (64, 64)), ("c", (513, 77)), ("d", (31, 1200))]


@pytest.mark.parametrize("num_ranks", [512, 1024])
def test_flat_spans_of_many_ranks(num_ranks):
    ranks = flat_spans(MATRICES, num_ranks)
    written = check(plan_of(ranks), ranks)
    assert len(written) == num_ranks


@pytest.mark.parametrize("num_ranks", [512, 1024])
def test_replicas_of_many_ranks(num_ranks):
    ranks = replicas([("a", (4096, 1024)), ("b", (4096,)), ("c", (1000, 999))], num_ranks)
    plan = plan_of(ranks)
    written = check(plan, ranks)
    assert len(written) == num_ranks
    assert max(written.values()) <= sum(file.data_bytes for file in plan.files) / num_ranks + PAGE


def test_a_first_cut_that_lies_before_its_region():
    ranks = [
        [part("own", (125,), primary=rank == 0, shared=False), part("all", (2**18,), primary=rank == 0)]
        for rank in range(1024)
    ]
    plan = plan_of(ranks)
    assert max(check(plan, ranks).values()) <= PAGE + 500


@pytest.mark.parametrize(("grid", "copies"), [((4, 8), 16), ((8, 16), 8)])
def test_blocks_and_copies_of_many_ranks(grid, copies):
    tensors = [("a", (3000, 4096)), ("b", (1024, 1021))]
    ranks = grid_boxes(tensors, grid, copies=copies)
    plan = plan_of(ranks, max_shard_bytes=10**8)
    written = check(plan, ranks)
    per_block = defaultdict(list)
    for rank in range(len(ranks)):
        per_block[rank % (grid[0] * grid[1])].append(written[rank])
    for sizes in per_block.values():
        assert len(sizes) == copies
        if sum(sizes) >= 2**20:
            assert max(sizes) - min(sizes) <= 2 * PAGE


@pytest.mark.parametrize("num_ranks", [512, 1024])
def test_hosts_share_the_files(num_ranks):
    tensors = [(f"t{number}", (100 + number, 700)) for number in range(64)]
    ranks, hosts = flat_spans(tensors, num_ranks), [rank // 8 for rank in range(num_ranks)]
    plan = plan_of(ranks, max_shard_bytes=10**6, host_of_rank=hosts)
    written = check(plan, ranks, hosts)
    check_hosts(plan, ranks, hosts)
    per_host = Counter()
    for rank, size in written.items():
        per_host[hosts[rank]] += size
    largest = max(file.data_bytes for file in plan.files)
    assert max(per_host.values()) <= sum(file.data_bytes for file in plan.files) / (num_ranks // 8) + largest


def test_a_file_goes_to_the_host_that_holds_most_of_it():
    ranks = flat_spans([(f"t{number}", (1000,)) for number in range(8)], 4)
    plan = plan_of(ranks, max_shard_bytes=4000, host_of_rank=[0, 0, 1, 1])
    assert len(plan.files) == 8
    assert all(one.writer == one.owner for one in plan.ranges())
    assert [one.writer for one in plan.ranges()] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_replicas_on_hosts_each_write_some_files():
    ranks = replicas([(f"t{number}", (10**6,)) for number in range(8)], 4)
    hosts = [0, 0, 1, 1]
    plan = plan_of(ranks, max_shard_bytes=4 * 10**6, host_of_rank=hosts)
    written = check(plan, ranks, hosts)
    assert all(one.writer == one.owner for one in plan.ranges())
    assert max(written.values()) - min(written.values()) <= 8 * PAGE


def test_a_host_that_holds_a_little_more_of_everything_does_not_write_everything():
    names = [f"t{number}" for number in range(20)]
    ranks = [[part(name, (100,), span=span) for name in names] for span in ((0, 60), (60, 100))]
    plan = plan_of(ranks, max_shard_bytes=400, host_of_rank=[0, 1])
    assert check(plan, ranks, [0, 1]) == {0: 4000, 1: 4000}


def test_small_regions_of_another_hosts_primaries_go_round():
    ranks = [[part(f"t{number}", (100,), primary=rank == number // 2 % 2) for number in range(8)] for rank in range(4)]
    plan = plan_of(ranks, max_shard_bytes=400, host_of_rank=[0, 0, 1, 1])
    assert [one.owner for one in plan.ranges()] == [0, 2, 1, 3, 0, 2, 1, 3]
    assert all(one.writer == one.owner for one in plan.ranges())


def test_what_no_rank_of_the_host_holds_is_relayed():
    ranks = [[part("a", (1000,), span=(0, 900))], [], [part("a", (1000,), span=(900, 1000))], []]
    plan = plan_of(ranks, host_of_rank=[0, 0, 1, 1])
    assert [(one.owner, one.writer) for one in plan.ranges()] == [(0, 0), (2, 0)]
    assert [one.owner for one in plan.ranges(owner=2)] == [2]
    assert list(plan.ranges(writer=2)) == []


def random_mesh_ranks(source, num_ranks):
    """A few tensors of random shapes, each cut over a random mesh of all ranks."""
    ranks = [[] for _ in range(num_ranks)]
    for number in range(2):
        shape = tuple(source.randint(1, 40) for _ in range(source.randint(1, 4)))
        dtype = source.choice(DTYPES)
        sizes = [2 ** source.randint(0, 5) for _ in shape]
        num_blocks = math.prod(sizes)
        while num_blocks > num_ranks:
            dim = max(range(len(sizes)), key=sizes.__getitem__)
            sizes[dim] //= 2
            num_blocks //= 2
        for rank in range(num_ranks):
            place = np.unravel_index(rank % num_blocks, sizes)
            box = tuple(_share(size, int(at), count) for size, at, count in zip(shape, place, sizes, strict=True))
            numel = math.prod(length for _, length in box)
            copies, copy = num_ranks // num_blocks, rank // num_blocks
            if number == 0:  # copies
                ranks[rank].append(part(f"t{number}", shape, box=box, dtype=dtype, primary=copy == 0))
            else:  # flat shards of the box
                first, length = _share(numel, copy, copies)
                ranks[rank].append(part(f"t{number}", shape, box=box, span=(first, first + length), dtype=dtype))
    return ranks


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.usefixtures("small_sizes")
def test_random_shapes_on_meshes_of_512_ranks(seed):
    _check_mesh(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 1010, 100))
@pytest.mark.usefixtures("small_sizes")
def test_a_thousand_random_shapes_on_meshes_of_512_ranks(seed):
    for number in range(seed, seed + 100):
        _check_mesh(number)


def _check_mesh(seed):
    ranks = random_mesh_ranks(random.Random(seed), 512)
    hosts = [None, [rank // 8 for rank in range(512)]][seed % 2]
    check(plan_of(ranks, host_of_rank=hosts), ranks, hosts)
