"""The plan of a save, up to 1,024 simulated ranks: every element once, the writing divided, one host per file."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict

import pytest
import torch
from checkpoint_plan_cases import (
    DTYPES,
    NAMES,
    PAGE,
    check,
    check_hosts,
    flat_spans,
    part,
    plan_of,
    replicas,
)
from oracles import naive_byte_runs as naive

from booster.checkpoint_io.formats.safetensors import encode_header
from booster.checkpoint_io.layout import plan_files
from booster.checkpoint_io.planning.save_plan import BLOCK_BYTES, plan_save
from booster.checkpoint_io.planning.slices import SliceTable
from booster.errors import CheckpointError
from booster.interface import TensorSpec


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
    assert plan.layout.index == "model.safetensors.index.json"
    assert len(plan.files) == 2
    assert list(plan.specs) == ["a", "b", "c", "d"]
    assert sum(file.data_bytes for file in plan.files) == sum(sizes.values()) == 90
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
    assert plan.layout.index is None
    numbered = plan_of([slices], always_index=True)
    assert [file.name for file in numbered.files] == ["model-00001-of-00001.safetensors"]
    assert numbered.layout.index == "model.safetensors.index.json"


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
    assert [one.name for one in plan.ranges()] == ["scalar", "split"]
    assert list(plan.files[0].tensors) == ["none", "scalar", "split"]
    assert check(plan, ranks) == {0: 20}


def test_no_tensors_at_all():
    plan = plan_of([[], []], always_index=True, host_of_rank=[0, 1])
    assert [file.name for file in plan.files] == ["model-00001-of-00001.safetensors"]
    assert list(plan.ranges()) == []
    assert sum(file.data_bytes for file in plan.files) == plan.files[0].data_bytes == 0


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_replicas_divide_a_file_at_pages(num_ranks):
    ranks = replicas([("a", (1000, 500)), ("b", (333,)), ("c", (999, 333))], num_ranks)
    plan = plan_of(ranks)
    written = check(plan, ranks)
    assert sorted(written) == list(range(num_ranks))
    assert max(abs(size - sum(file.data_bytes for file in plan.files) / num_ranks) for size in written.values()) <= PAGE
    for rank in range(num_ranks):
        places = [_place(plan, one) for one in plan.ranges(writer=rank)]
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
    assert all(one.span[0] * 4 % PAGE == 0 for one in plan.ranges())


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
    for one in plan.ranges():
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
    assert list(separate.ranges()) == list(plan_of(ranks, max_shard_bytes=10**6).ranges())


def test_ranges_by_rank_are_all_ranges():
    ranks = replicas([("a", (10**6,)), ("b", (5000, 200))], 4)
    plan = plan_of(ranks, max_shard_bytes=10**6, host_of_rank=[0, 1, 1, 0])
    ranges = list(plan.ranges())
    for rank in range(4):
        assert list(plan.ranges(writer=rank)) == [one for one in ranges if one.writer == rank]
        assert list(plan.ranges(owner=rank)) == [one for one in ranges if one.owner == rank]


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


NUM_TENSORS, NUM_RANKS, MAX_SECONDS = 100_000, 1024, 5.0


def many_tensors():
    return [(f"model.layers.{number}.weight", (number % 7 + 1, 64 + number % 5)) for number in range(NUM_TENSORS)]


MANY_HOSTS = [rank // 8 for rank in range(NUM_RANKS)]


@pytest.mark.slow
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
    num_ranges = sum(1 for _ in plan.ranges())
    list(plan.ranges(writer=NUM_RANKS - 1))
    assert time.process_time() - begin < MAX_SECONDS
    assert num_ranges >= NUM_TENSORS


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


def test_unwritten_elements():
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
    assert len(table.names) == len(slices)
    rows = table.rows
    for place, one in enumerate(slices):
        spec = TensorSpec(shape=one.global_shape, dtype=one.dtype)
        found = (table.names[place], table.specs[rows.spec[place]], table.boxes[rows.box[place]])
        assert found == (one.name, spec, one.box)
        assert (rows.start[place], rows.stop[place]) == one.span
        assert (rows.is_primary[place], rows.is_shared[place]) == (one.primary, one.shared)


def test_tables_of_whole_tensors_are_short():
    slices = [part(f"layers.{number}.weight", (64, 64)) for number in range(1000)]
    names = sum(len(one.name) + 3 for one in slices)
    assert len(SliceTable.from_slices(slices).encode()) < names + 3 * len(slices) + 200
