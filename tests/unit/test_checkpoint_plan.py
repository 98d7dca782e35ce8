"""The plan of a save, up to 1,024 simulated ranks: every element once, the writing divided, one host per file."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from oracles import naive_byte_runs as naive

from booster.checkpoint_io.formats.safetensors import encode_header
from booster.checkpoint_io.layout import MODEL, plan_files
from booster.checkpoint_io.planning import save_plan
from booster.checkpoint_io.planning.save_plan import BLOCK_BYTES, plan_save
from booster.checkpoint_io.planning.slices import SliceTable, full_box
from booster.errors import CheckpointError
from booster.interface import TensorSlice, TensorSpec

NAMES = MODEL.names(is_safetensors=True)
PAGE = 4096
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@functools.cache
def memory(numel, dtype):
    return torch.empty(numel, dtype=dtype, device="meta")


def part(name, shape, *, box=None, span=None, dtype=torch.float32, primary=True, shared=True):
    box = full_box(shape) if box is None else box
    span = (0, math.prod(length for _, length in box)) if span is None else span
    return TensorSlice(
        name=name,
        dtype=dtype,
        global_shape=shape,
        box=box,
        span=span,
        tensor=memory(span[1] - span[0], dtype),
        primary=primary,
        shared=shared,
    )


def plan_of(ranks, **more):
    """Plans for these slices per rank; equal tables are given once, after a trip through their bytes."""
    raws = [SliceTable.from_slices(slices).encode() for slices in ranks]
    distinct = list(dict.fromkeys(raws))
    tables = [SliceTable.decode(raw) for raw in distinct]
    arguments = {"max_shard_bytes": 10**12, "is_sharded": True, "always_index": False, **more}
    return plan_save(tables, [distinct.index(raw) for raw in raws], NAMES, **arguments)


def check(plan, ranks, host_of_rank=None):
    """Proves a plan element by element, and returns the bytes that each rank writes."""
    numbers = {name: np.arange(math.prod(spec.shape)).reshape(spec.shape) for name, spec in plan.specs.items()}
    counts = {name: np.zeros(number.size, dtype=np.uint8) for name, number in numbers.items()}
    written, hosts, order = Counter(), defaultdict(set), []
    is_shared = sharing(ranks)
    for one in plan.all_ranges():
        mine, itemsize = ranks[one.owner][one.slice_index], plan.specs[one.name].dtype.itemsize
        assert (mine.name, mine.box) == (one.name, one.box)
        assert mine.span[0] <= one.span[0] < one.span[1] <= mine.span[1]
        assert mine.primary or (mine.shared and is_shared[mine.name, mine.box, mine.span])
        assert (one.span[1] - one.span[0]) * itemsize <= save_plan.BLOCK_BYTES
        block = numbers[one.name][tuple(slice(offset, offset + length) for offset, length in one.box)]
        counts[one.name][block.reshape(-1)[one.span[0] : one.span[1]]] += 1
        written[one.writer] += (one.span[1] - one.span[0]) * itemsize
        hosts[one.file].add(None if host_of_rank is None else host_of_rank[one.writer])
        assert host_of_rank is not None or one.writer == one.owner
        first = int(block.reshape(-1)[mine.span[0]]) * itemsize + plan.files[one.file].starts[one.name]
        order.append((one.file, first, one.span))
    assert order == sorted(order)
    assert all((count == 1).all() for count in counts.values())
    assert all(len(found) == 1 for found in hosts.values()), "a file is written by two hosts"
    return written


def sharing(ranks):
    """Returns for each part whether its primary shares it."""
    return {(one.name, one.box, one.span): one.shared for slices in ranks for one in slices if one.primary}


def replicas(names_and_shapes, num_ranks, *, primary_rank=0, **more):
    return [
        [part(name, shape, primary=rank == primary_rank, **more) for name, shape in names_and_shapes]
        for rank in range(num_ranks)
    ]


# Files


def test_files_are_laid_out_as_their_headers_are():
    shapes = [
        ("a", (3, 5), torch.bfloat16),
        ("b", (), torch.float32),
        ("c", (0, 4), torch.int64),
        ("d", (7,), torch.int64),
    ]
    slices = [part(name, shape, dtype=dtype) for name, shape, dtype in shapes]
    plan = plan_of([slices], max_shard_bytes=60)
    sizes = {one.name: one.tensor.numel() * one.dtype.itemsize for one in slices}
    expected = plan_files(sizes, NAMES, max_shard_bytes=60)
    assert {file.name: set(file.tensors) for file in plan.files} == {
        name: set(tensors) for name, tensors in expected.files.items()
    }
    assert plan.index == "model.safetensors.index.json"
    assert len(plan.files) == 2
    assert list(plan.specs) == ["a", "b", "c", "d"]
    assert plan.total_bytes == sum(sizes.values()) == 90
    for file in plan.files:
        header = encode_header(file.tensors, {})[1]
        assert list(header) == list(file.tensors) == list(file.starts)
        assert {name: one.start for name, one in header.items()} == file.starts
        assert file.data_bytes == max(one.stop for one in header.values())
    assert check(plan, [slices]) == {0: 90}


def test_one_file_where_nothing_is_sharded():
    slices = [part("a", (10,)), part("b", (10,))]
    plan = plan_of([slices], max_shard_bytes=1, is_sharded=False)
    assert [file.name for file in plan.files] == ["model.safetensors"]
    assert plan.index is None
    numbered = plan_of([slices], always_index=True)
    assert [file.name for file in numbered.files] == ["model-00001-of-00001.safetensors"]
    assert numbered.index == "model.safetensors.index.json"


def test_tensors_are_in_the_order_in_which_ranks_name_them():
    ranks = [[part("b", (2,)), part("c", (2,))], [part("c", (2,), primary=False), part("a", (2,))], [part("0", (2,))]]
    assert list(plan_of(ranks).specs) == ["b", "c", "a", "0"]


def test_what_is_empty_has_no_ranges():
    ranks = [
        [part("none", (0, 3)), part("scalar", ()), part("split", (4,), span=(0, 4))],
        [part("none", (0, 3), primary=False), part("split", (4,), span=(4, 4))],
        [],
    ]
    plan = plan_of(ranks)
    assert [one.name for one in plan.all_ranges()] == ["scalar", "split"]
    assert list(plan.files[0].tensors) == ["none", "scalar", "split"]
    assert check(plan, ranks) == {0: 20}


def test_no_tensors_at_all():
    plan = plan_of([[], []], always_index=True, host_of_rank=[0, 1])
    assert [file.name for file in plan.files] == ["model-00001-of-00001.safetensors"]
    assert list(plan.all_ranges()) == []
    assert plan.total_bytes == plan.files[0].data_bytes == 0


# Who writes


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_replicas_divide_a_file_at_pages(num_ranks):
    ranks = replicas([("a", (1000, 500)), ("b", (333,)), ("c", (999, 333))], num_ranks)
    plan = plan_of(ranks)
    written = check(plan, ranks)
    assert sorted(written) == list(range(num_ranks))
    assert max(abs(size - plan.total_bytes / num_ranks) for size in written.values()) <= PAGE
    for rank in range(num_ranks):
        places = [_place(plan, one) for one in plan.ranges_written_by(rank)]
        assert places[0][0] % PAGE == 0
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(places)), "one stretch each"


def _place(plan, one):
    itemsize, start = plan.specs[one.name].dtype.itemsize, plan.files[one.file].starts[one.name]
    return start + one.span[0] * itemsize, start + one.span[1] * itemsize


def test_small_regions_are_the_primarys():
    ranks = replicas([("a", (1000, 100))], 4, primary_rank=2)
    assert check(plan_of(ranks), ranks) == {2: 400_000}


def test_what_is_not_shared_is_the_primarys():
    ranks = [
        [
            part("kept", (10**6,), shared=False, primary=rank == 1),
            part("drifted", (10**6,), shared=rank == 1, primary=rank == 1),
        ]
        for rank in range(3)
    ]
    assert check(plan_of(ranks), ranks) == {1: 8 * 10**6}


def test_who_does_not_share_does_not_help():
    ranks = [[part("a", (10**6,), primary=rank == 0, shared=rank != 1)] for rank in range(3)]
    written = check(plan_of(ranks), ranks)
    assert sorted(written) == [0, 2]
    assert abs(written[0] - written[2]) <= 2 * PAGE


def test_buffers_in_between_do_not_end_a_region():
    ranks = []
    for rank in range(4):
        slices = []
        for layer in range(50):
            slices.append(part(f"{layer}.weight", (10_000,), primary=rank == 0))
            slices.append(part(f"{layer}.mean", (10,), primary=rank == 0, shared=False))
        ranks.append(slices)
    plan = plan_of(ranks)
    written = check(plan, ranks)
    assert max(written.values()) - min(written.values()) <= 2 * PAGE + 50 * 40


def test_strided_boxes_are_divided_in_slice_order():
    shape = (2000, 1000)
    ranks = [[part("a", shape, box=((0, 2000), (500 * (rank % 2), 500)), primary=rank < 2)] for rank in range(6)]
    plan = plan_of(ranks)
    written = check(plan, ranks)
    assert max(written.values()) - min(written.values()) <= 2 * PAGE
    assert all(one.span[0] * 4 % PAGE == 0 for one in plan.all_ranges())


def test_ranges_end_at_blocks():
    # Offset by one tensor of odd size, so that blocks of the file are not blocks of the tensor.
    flat, left, right = ((0, 9 * 2**19),), ((0, 2**12), (0, 700)), ((0, 2**12), (700, 324))
    ranks = [
        [
            part("odd", (1001,), dtype=torch.int64),
            part("flat", (9 * 2**19,), dtype=torch.int64),
            part("split", (2**12, 2**10), box=left, dtype=torch.int64),
            part("split", (2**12, 2**10), box=right, dtype=torch.int64),
        ]
    ]
    plan = plan_of(ranks)
    check(plan, ranks)
    found = defaultdict(list)
    for one in plan.all_ranges():
        found[one.name, one.box].append(one)
    places = [_place(plan, one) for one in found["flat", flat]]
    assert places[0] == (8008, BLOCK_BYTES)
    assert [stop for _, stop in places] == [BLOCK_BYTES, 2 * BLOCK_BYTES, 8008 + 36 * 2**20]
    assert [one.span for one in found["split", left]] == [(0, 2**21), (2**21, 2**12 * 700)]


def test_a_slice_that_a_rank_holds_twice_counts_once():
    shape = (2**20,)
    ranks = [[part("a", shape, primary=False), part("a", shape)], [part("a", shape, primary=False)]]
    assert check(plan_of(ranks), ranks) == {0: 2**21, 1: 2**21}


def test_the_plan_does_not_depend_on_how_tables_are_shared():
    ranks = replicas([("a", (10**6,)), ("b", (50, 20))], 5, primary_rank=3)
    tables = [SliceTable.from_slices(slices) for slices in ranks]
    arguments = {"max_shard_bytes": 10**6, "is_sharded": True, "always_index": False}
    separate = plan_save(tables, range(5), NAMES, **arguments)
    assert list(separate.all_ranges()) == list(plan_of(ranks, max_shard_bytes=10**6).all_ranges())


def test_ranges_by_rank_are_all_ranges():
    ranks = replicas([("a", (10**6,)), ("b", (5000, 200))], 4)
    plan = plan_of(ranks, max_shard_bytes=10**6, host_of_rank=[0, 1, 1, 0])
    ranges = list(plan.all_ranges())
    for rank in range(4):
        assert plan.ranges_written_by(rank) == [one for one in ranges if one.writer == rank]
        assert plan.ranges_owned_by(rank) == [one for one in ranges if one.owner == rank]


# Random plans


@pytest.fixture
def small_sizes(monkeypatch):
    """Blocks, pages and regions of a few bytes, so that small tensors meet all cuts."""
    monkeypatch.setattr(save_plan, "BLOCK_BYTES", 128)
    monkeypatch.setattr(save_plan, "PAGE_BYTES", 16)
    monkeypatch.setattr(save_plan, "_MIN_REGION_BYTES", 48)


def random_ranks(source, num_ranks, num_tensors, **shape):
    ranks = [[] for _ in range(num_ranks)]
    for number in range(num_tensors):
        size, dtype = naive.random_shape(source, **shape), source.choice(DTYPES)
        for rank, box, span in naive.random_partition(source, size, num_ranks):
            shared = source.random() < 0.8
            ranks[rank].append(part(f"t{number}", size, box=box, span=span, dtype=dtype, shared=shared))
            for other in source.sample(range(num_ranks), source.randint(0, num_ranks)):
                if other != rank:
                    copy = part(
                        f"t{number}", size, box=box, span=span, dtype=dtype, primary=False, shared=source.random() < 0.8
                    )
                    ranks[other].append(copy)
    return ranks


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.usefixtures("small_sizes")
def test_random_plans(seed):
    source = random.Random(seed)
    num_ranks = source.randint(1, 8)
    ranks = random_ranks(source, num_ranks, source.randint(0, 12))
    hosts = source.choice([None, [source.choice([3, 8, 9]) for _ in range(num_ranks)]])
    plan = plan_of(ranks, max_shard_bytes=source.choice([100, 1000, 10**6]), host_of_rank=hosts)
    check(plan, ranks, hosts)
    if hosts is not None:
        check_hosts(plan, ranks, hosts)


def check_hosts(plan, ranks, hosts):
    """Checks that ranks write their own wherever a holder is on the file's host, and others as the rule says."""
    host_of_file = {one.file: hosts[one.writer] for one in plan.all_ranges()}
    is_shared, hosts_of_part = sharing(ranks), defaultdict(set)
    for rank, slices in enumerate(ranks):
        for one in slices:
            if one.primary or (one.shared and is_shared.get((one.name, one.box, one.span))):
                hosts_of_part[one.name, one.box, one.span].add(hosts[rank])
    for one in plan.all_ranges():
        host = host_of_file[one.file]
        if hosts[one.owner] == host:
            assert one.writer == one.owner
            continue
        local = [rank for rank, number in enumerate(hosts) if number == host]
        assert one.writer == local[one.owner % len(local)]
        mine = ranks[one.owner][one.slice_index]
        assert host not in hosts_of_part[mine.name, mine.box, mine.span]


# Many ranks


def flat_spans(tensors, num_ranks, *, copies=1):
    """ZeRO: all tensors end to end, one stretch per rank; several groups of ranks hold copies of all of it."""
    share = -(-sum(math.prod(shape) for _, shape in tensors) // num_ranks)
    ranks = [[] for _ in range(num_ranks * copies)]
    offset = 0
    for name, shape in tensors:
        numel = math.prod(shape)
        for rank in range(offset // share, (offset + numel - 1) // share + 1):
            span = (max(rank * share - offset, 0), min((rank + 1) * share - offset, numel))
            for copy in range(copies):
                ranks[copy * num_ranks + rank].append(part(name, shape, span=span, primary=copy == 0))
        offset += numel
    return ranks


def grid_boxes(tensors, grid, *, copies=1):
    """A mesh of ranks, each with a block of every matrix, and copies of it."""
    num_blocks = grid[0] * grid[1]
    ranks = []
    for rank in range(num_blocks * copies):
        row, column = divmod(rank % num_blocks, grid[1])
        slices = []
        for name, (height, width) in tensors:
            box = (_share(height, row, grid[0]), _share(width, column, grid[1]))
            slices.append(part(name, (height, width), box=box, primary=rank < num_blocks))
        ranks.append(slices)
    return ranks


def _share(size, number, count):
    first, last = size * number // count, size * (number + 1) // count
    return first, last - first


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
    assert max(written.values()) <= plan.total_bytes / num_ranks + PAGE


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
    assert max(per_host.values()) <= plan.total_bytes / (num_ranks // 8) + largest


def test_a_file_goes_to_the_host_that_holds_most_of_it():
    ranks = flat_spans([(f"t{number}", (1000,)) for number in range(8)], 4)
    plan = plan_of(ranks, max_shard_bytes=4000, host_of_rank=[0, 0, 1, 1])
    assert len(plan.files) == 8
    assert all(one.writer == one.owner for one in plan.all_ranges())
    assert [one.writer for one in plan.all_ranges()] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_replicas_on_hosts_each_write_some_files():
    ranks = replicas([(f"t{number}", (10**6,)) for number in range(8)], 4)
    hosts = [0, 0, 1, 1]
    plan = plan_of(ranks, max_shard_bytes=4 * 10**6, host_of_rank=hosts)
    written = check(plan, ranks, hosts)
    assert all(one.writer == one.owner for one in plan.all_ranges())
    assert max(written.values()) - min(written.values()) <= 8 * PAGE


def test_a_host_that_holds_a_little_more_of_everything_does_not_write_everything():
    names = [f"t{number}" for number in range(20)]
    ranks = [[part(name, (100,), span=span) for name in names] for span in ((0, 60), (60, 100))]
    plan = plan_of(ranks, max_shard_bytes=400, host_of_rank=[0, 1])
    assert check(plan, ranks, [0, 1]) == {0: 4000, 1: 4000}


def test_small_regions_of_another_hosts_primaries_go_round():
    ranks = [[part(f"t{number}", (100,), primary=rank == number // 2 % 2) for number in range(8)] for rank in range(4)]
    plan = plan_of(ranks, max_shard_bytes=400, host_of_rank=[0, 0, 1, 1])
    assert [one.owner for one in plan.all_ranges()] == [0, 2, 1, 3, 0, 2, 1, 3]
    assert all(one.writer == one.owner for one in plan.all_ranges())


def test_what_no_rank_of_the_host_holds_is_relayed():
    ranks = [[part("a", (1000,), span=(0, 900))], [], [part("a", (1000,), span=(900, 1000))], []]
    plan = plan_of(ranks, host_of_rank=[0, 0, 1, 1])
    assert [(one.owner, one.writer) for one in plan.all_ranges()] == [(0, 0), (2, 0)]
    assert [one.owner for one in plan.ranges_owned_by(2)] == [2]
    assert plan.ranges_written_by(2) == []


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


# Speed: computed on processors that others use too, so counted in processor seconds.

NUM_TENSORS, NUM_RANKS, MAX_SECONDS = 100_000, 1024, 5.0


def many_tensors():
    return [(f"model.layers.{number}.weight", (number % 7 + 1, 64 + number % 5)) for number in range(NUM_TENSORS)]


MANY_HOSTS = [rank // 8 for rank in range(NUM_RANKS)]


@pytest.mark.parametrize(
    ("hosts", "layout"),
    [
        pytest.param(MANY_HOSTS, "flat", id="128 hosts-flat"),
        pytest.param(None, "replicated", id="one host-replicated"),
        pytest.param(None, "flat", id="one host-flat", marks=pytest.mark.slow),
        pytest.param(MANY_HOSTS, "replicated", id="128 hosts-replicated", marks=pytest.mark.slow),
    ],
)
def test_a_hundred_thousand_tensors_over_a_thousand_ranks(layout, hosts):
    if layout == "flat":
        tables, table_of_rank = flat_spans(many_tensors(), NUM_RANKS), range(NUM_RANKS)
    else:
        tables, table_of_rank = replicas(many_tensors(), 2), [0] + [1] * (NUM_RANKS - 1)
    raws = [SliceTable.from_slices(slices).encode() for slices in tables]
    begin = time.process_time()
    plan = plan_save(
        [SliceTable.decode(raw) for raw in raws],
        table_of_rank,
        NAMES,
        max_shard_bytes=10**7,
        is_sharded=True,
        always_index=False,
        host_of_rank=hosts,
    )
    num_ranges = sum(1 for _ in plan.all_ranges())
    plan.ranges_written_by(NUM_RANKS - 1)
    assert time.process_time() - begin < MAX_SECONDS
    assert num_ranges >= NUM_TENSORS


# Errors


def error_of(ranks, **more):
    with pytest.raises(CheckpointError) as caught:
        plan_of(ranks, **more)
    assert "nothing was written" in str(caught.value)
    return str(caught.value)


def test_ranks_that_disagree_about_a_tensor():
    ranks = [[part("a", (4,))], [part("a", (4,), primary=False)], [part("a", (5,), primary=False)]]
    text = error_of(ranks)
    assert "'a' is float32 of shape (4,) on rank 0 and float32 of shape (5,) on rank 2" in text
    other = error_of([[part("a", (4,))], [part("b", (4,)), part("a", (4,), dtype=torch.float16, primary=False)]])
    assert "'a' is float32 of shape (4,) on rank 0 and float16 of shape (4,) on rank 1" in other


def test_one_rank_that_disagrees_with_itself():
    assert "rank 0 and" in error_of([[part("a", (4,), span=(0, 2)), part("a", (2, 2), span=(2, 4))]])


def test_two_primaries():
    text = error_of([[part("a", (4,))], [part("b", (4,))], [part("a", (4,))]])
    assert "'a'" in text
    assert "marked primary 2 times, by ranks 0, 2" in text
    assert "by ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more" in error_of([[part("a", (4,))]] * 10)
    assert "marked primary 2 times, by rank 0" in error_of([[part("a", (4,)), part("a", (4,))]])


def test_primaries_that_overlap():
    text = error_of([[part("a", (2, 4), span=(0, 6))], [part("a", (2, 4), span=(5, 8))]])
    assert "element (1, 1) of 'a'" in text
    assert "on ranks 0, 1, so nothing was written" in text
    boxes = error_of([[part("a", (2, 4), box=((0, 2), (0, 3)))], [part("a", (2, 4), box=((0, 2), (2, 2)))]])
    assert "element (0, 2) of 'a'" in boxes
    # As many elements twice as not at all: no sum tells.
    both = error_of([[part("a", (4, 4), box=((0, 2), (0, 4)))], [part("a", (4, 4), box=((1, 2), (0, 4)))]])
    assert "element (1, 0) of 'a'" in both


def test_elements_that_nobody_writes():
    text = error_of([[part("a", (2, 4), span=(0, 3))], [part("a", (2, 4), span=(4, 8))]])
    assert "element (0, 3) of 'a', which is float32 of shape (2, 4), is in no primary slice" in text
    assert "other copies: no rank" in text
    assert "other copies: ranks 0, 1" in error_of(replicas([("a", (4,))], 2, primary_rank=None))
    assert "element (1, 0, 3) of 'b'" in error_of(
        [[part("b", (2, 2, 4), box=((0, 2), (0, 2), (0, 3)))], [part("b", (2, 2, 4), box=((0, 1), (0, 2), (3, 1)))]]
    )


def test_a_tensor_larger_than_any_disk():
    with pytest.raises(CheckpointError, match=r"above the limit of 2\*\*62"):
        plan_of([[part("a", (2**40, 2**40), span=(0, 0))]])


@pytest.mark.parametrize("seed", range(60))
def test_every_damage_to_a_tiling_is_found(seed):
    source = random.Random(seed)
    ranks = random_ranks(source, 4, 3)
    held = [(rank, one) for rank, slices in enumerate(ranks) for one in slices if one.primary and one.tensor.numel()]
    if not held:
        pytest.skip("nothing but empty tensors")
    rank, one = source.choice(held)
    ranks[rank] = [other for other in ranks[rank] if other is not one]
    start, stop = one.span
    changed = source.choice([(start, start), (start + 1, stop), (start, stop - 1)])
    ranks[rank].append(part(one.name, one.global_shape, box=one.box, span=changed, dtype=one.dtype))
    assert f"{one.name!r}" in error_of(ranks)


# Tables


def test_tables_come_through_their_bytes():
    slices = [
        part("whole", (3, 4), primary=False),
        part("flat", (3, 4), span=(2, 7), shared=False),
        part("box", (3, 4), box=((1, 2), (0, 3)), span=(1, 6), dtype=torch.float8_e4m3fn),
        part("scalar", ()),
        part("none", (0, 2**40)),
        part('name with "quotes", \u00fc and \u2028', (1,)),
    ]
    table = SliceTable.decode(SliceTable.from_slices(slices).encode())
    assert len(table) == len(slices)
    for place, one in enumerate(slices):
        spec = TensorSpec(shape=one.global_shape, dtype=one.dtype)
        found = (table.names[place], table.specs[table.spec_of[place]], table.boxes[table.box_of[place]])
        assert found == (one.name, spec, one.box)
        assert (table.starts[place], table.stops[place]) == one.span
        assert (table.is_primary[place], table.is_shared[place]) == (one.primary, one.shared)


def test_tables_of_whole_tensors_are_short():
    slices = [part(f"layers.{number}.weight", (64, 64)) for number in range(1000)]
    names = sum(len(one.name) + 3 for one in slices)
    assert len(SliceTable.from_slices(slices).encode()) < names + 3 * len(slices) + 200
